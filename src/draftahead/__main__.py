"""`python -m draftahead` is the same as `draftahead`."""

from draftahead.cli import main

main()
