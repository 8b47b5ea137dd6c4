"""From logits to a token: processors, keyed noise, drafted draws, and the acceptance rules."""
