// A forward pass of a llama-shaped decoder: its layers, final norm, LM head and most likely tokens.

#pragma once

#include "layer.h"
#include "screening.h"

namespace {

// Copies this thread's part of hidden states [num_tokens][hidden_size] after `layers_done` layers
// to f.aux_hidden, if it is one of f.aux_layers.
void store_aux_hidden(const Model& m, const ForwardArgs& f, int64_t layers_done,
                      const float* hidden) {
  for (int64_t c = 0; c < f.num_aux_layers; c++) {
    if (f.aux_layers[c] != layers_done) continue;
    const Range mine = thread_range(f.num_sequences * f.num_nodes, 1);
    for (int64_t t = mine.begin; t < mine.end; t++)
      std::memcpy(f.aux_hidden + (t * f.num_aux_layers + c) * m.hidden_size,
                  hidden + t * m.hidden_size, m.hidden_size * sizeof(float));
  }
}

// Tokens of the TOPK largest logits, largest first, the lower id first of equals. tokens[0] is -1
// if the argmax is not defined: a logit is NaN, or the largest is infinite. Blocks of logits whose
// maximum is too small are skipped.
void topk(const float* logits, int64_t vocab_size, int64_t* tokens) {
  constexpr int64_t block = 256;
  float values[TOPK];
  for (int k = 0; k < TOPK; k++) values[k] = -INFINITY, tokens[k] = -1;
  i32x16 nan = {};
  for (int64_t begin = 0; begin < vocab_size; begin += block) {
    int64_t end = begin + block < vocab_size ? begin + block : vocab_size, i = begin;
    f32x16 lane_max = broadcast(-INFINITY);
    for (; i + 16 <= end; i += 16) {
      f32x16 v = load(logits + i);
      nan |= v != v;
      lane_max = v > lane_max ? v : lane_max;
    }
    float largest = max_lane(lane_max);
    for (; i < end; i++) {
      if (logits[i] != logits[i]) nan = nan | -1;
      largest = logits[i] > largest ? logits[i] : largest;
    }
    if (!(largest > values[TOPK - 1])) continue;
    for (i = begin; i < end; i++) {
      if (!(logits[i] > values[TOPK - 1])) continue;
      int k = TOPK - 1;
      for (; k > 0 && logits[i] > values[k - 1]; k--)
        values[k] = values[k - 1], tokens[k] = tokens[k - 1];
      values[k] = logits[i], tokens[k] = i;
    }
  }
  bool undefined = std::isinf(values[0]);
  for (int lane = 0; lane < 16; lane++) undefined |= nan[lane] != 0;
  if (undefined) tokens[0] = -1;
}

// Final norm, logits and most likely tokens of all nodes. Called by all threads.
void lm_head(const Model& m, const ForwardArgs& f, SharedBuffers& b, ThreadBuffers& local) {
  const int64_t num_tokens = f.num_sequences * f.num_nodes, vocab_size = m.lm_head.out_features;
  const ScreenedHead* screened = m.screened_head;
  const Weights& first = screened ? screened->projection : m.lm_head;
  Inputs inputs = prepared(m, b, local, {&first}, f.hidden, m.final_norm, num_tokens);
  const float* normed = inputs.x;
  store_aux_hidden(m, f, m.num_layers, normed);
  if (screened) {
    linear(first, inputs, num_tokens, b.q, Output::STORE);
    barrier();
    inputs = prepared(m, b, local, {&screened->screening_head}, b.q, nullptr, num_tokens);
  }
  linear(screened ? screened->screening_head : first, inputs, num_tokens, f.logits, Output::STORE);
  barrier();
  const Range mine = thread_range(num_tokens, 1);
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* logits = f.logits + t * vocab_size;
    if (screened) {
      uint8_t* integers = b.integers + t * integer_bytes(screened->vocab_rows);
      encode_token(screened->vocab_rows, normed + t * m.hidden_size, integers);
      replace_candidates(*screened, integers, logits);
    }
    if (f.topk) topk(logits, vocab_size, f.topk + t * TOPK);
  }
}

// Whether all values lie in [begin, end).
inline bool all_in(const int64_t* values, int64_t count, int64_t begin, int64_t end) {
  return std::all_of(values, values + count,
                     [=](int64_t value) { return begin <= value && value < end; });
}

// Which size of a call would make a forward read or write beside its memory, or null. The tensors
// themselves are checked in Python: those of the model when it is bound, the others by their
// shapes.
const char* invalid(const Model& m, const ForwardArgs& f) {
  if (f.num_sequences < 0 || f.first_slot < 0 || f.first_slot + f.num_sequences > m.num_slots)
    return "its sequences lie outside of the cache's slots";
  if (f.num_nodes < 0 || f.tree_size > MAX_NODES || (!f.tree_nodes && f.num_nodes != f.tree_size))
    return "its number of nodes does not fit the trees";
  if (!all_in(f.num_cached, f.num_sequences, 0, m.num_entries - f.tree_size + 1))
    return "its nodes lie outside of the cache's entries";
  if (f.tree_nodes && !all_in(f.tree_nodes, f.num_sequences * f.num_nodes, 0, f.tree_size))
    return "its nodes lie outside of the trees";
  for (int64_t i = 0; i < f.num_sequences * f.tree_size; i++)
    if (f.tree_size < MAX_NODES && f.ancestors[i] >> f.tree_size)
      return "ancestors lie outside of the trees";
  if (!f.first_input && m.num_layers && m.first_input_size != m.hidden_size)
    return "the input of the first layer is missing";
  return nullptr;
}

int64_t scratch_size(const Model& m, int64_t num_tokens, int64_t threads) {
  return SharedBuffers::size(m, num_tokens) + threads * ThreadBuffers::size(m) + 64;
}

void forward(const Model& m, const ForwardArgs& f, int64_t threads) {
  const int64_t num_tokens = f.num_sequences * f.num_nodes;
  if (!num_tokens) return;
  SharedBuffers b(m, num_tokens, f.scratch);
  float* rest = f.scratch + SharedBuffers::size(m, num_tokens);
  parallel(threads, [&] {
    ThreadBuffers local(m, rest + thread_index() * ThreadBuffers::size(m));
    for (int64_t i = 0; i < m.num_layers; i++) {
      // The layer writes f.hidden only behind its first barrier.
      if (i) store_aux_hidden(m, f, i, f.hidden);
      decoder_layer(m, m.layers[i], f, b, local);
    }
    if (f.logits) lm_head(m, f, b, local);
  });
}

}  // namespace
