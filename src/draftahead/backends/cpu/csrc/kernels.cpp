// CPU kernels for forward passes over a few tokens, compiled for the CPU they run on (build.py).
//
// Decoding reads every weight once per forward pass, so a forward over 8 tokens should cost what
// one over 1 token costs: a weight is loaded once and used for all tokens. Every sum runs in an
// order that depends neither on the number of tokens nor on a token's place among them, so the bits
// of a token's logits are the same as a root, as a drafted node, and in any batch.
//
// Read in this order: abi.h (structs from Python), vectors.h, linear.h, threads.h, workspace.h,
// kv_rows.h, lanes.h, attention_products.h, attention.h, layer.h, screening.h, forward.h,
// tree_builder.h; the functions below are all that Python calls.

#include "tree_builder.h"

extern "C" {

// See abi_description.
const char* draftahead_abi() {
  static const std::string text = abi_description();
  return text.c_str();
}

int64_t draftahead_scratch_size(const Model* m, int64_t num_tokens, int64_t threads) {
  return scratch_size(*m, num_tokens, threads);
}

// This and the next: what is wrong about the sizes of the call, and then nothing is done; or null.
const char* draftahead_forward(const Model* m, const ForwardArgs* args, int64_t threads) {
  const char* problem = invalid(*m, *args);
  if (!problem) forward(*m, *args, threads);
  return problem;
}

const char* draftahead_build_trees(const Model* m, TreeArgs* args, int64_t threads) {
  if (const char* problem = invalid(*m, *args)) return problem;
  try {
    build_trees(*m, *args, threads);
  } catch (const std::bad_alloc&) { return "there is not enough memory"; }
  return nullptr;
}

// One linear layer, for models that draftahead_forward does not support. The last three are memory
// for quantized inputs.
void draftahead_linear(const Weights* w, const float* x, int64_t num_tokens, float* y,
                       int64_t threads, int8_t* quantized, float* scales, int32_t* corrections) {
  const Activations a = {x, num_tokens > 1 ? w->in_features : 0, quantized, scales, corrections};
  linear_all_threads(*w, a, num_tokens, y, threads);
}

// Reads memory and does nothing else: the memory-bandwidth bound that a forward is measured
// against.
float draftahead_read_memory(const float* data, int64_t count, int64_t threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const Range mine = thread_range(count, 128);
    f32x16 acc[8] = {};
    for (int64_t i = mine.begin; i + 128 <= mine.end; i += 128)
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) acc[c] += load(data + i + 16 * c);
    for (int c = 0; c < 8; c++) total += sum_lanes(acc[c]);
  }
  return total;
}

}  // extern "C"
