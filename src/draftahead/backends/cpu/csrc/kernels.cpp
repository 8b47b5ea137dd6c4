// CPU kernels for forward passes over a few tokens, compiled for the CPU they run on (build.py).
//
// Decoding reads every weight once per forward pass, so a forward over 8 tokens should cost what
// one over 1 token costs: a weight is loaded once and used for all tokens. Every sum runs in an
// order that depends neither on the number of tokens nor on a token's place among them, so the bits
// of a token's logits are the same as a root, as a drafted node, and in any batch.
//
// Read in this order: abi.h (structs from Python), vectors.h, blocks.h, float_rows.h, dot.h,
// panels.h, int8_groups.h, linear.h, threads.h, workspace.h, kv_rows.h, lanes.h,
// attention_products.h, attention.h, layer.h, screening.h, forward.h, tree_builder.h; the functions
// below are all that Python calls.

#include "tree_builder.h"

// The name that Python calls: draftahead_forward_avx2, for one. This file is compiled once for each
// instruction set (compiler.py), and all of them may lie in one library.
#define JOINED(name, isa) draftahead_##name##_##isa
#define NAME(name, isa) JOINED(name, isa)
#define EXPORT(name) NAME(name, KERNEL_ISA)

extern "C" {

// See abi_description.
const char* EXPORT(abi)() {
  static const std::string text = abi_description();
  return text.c_str();
}

int64_t EXPORT(scratch_size)(const Model* m, int64_t num_tokens, int64_t threads) {
  return scratch_size(*m, num_tokens, threads);
}

// This and the next: what is wrong about the sizes of the call, and then nothing is done; or null.
const char* EXPORT(forward)(const Model* m, const ForwardArgs* args, int64_t threads) {
  const char* problem = invalid(*m, *args);
  if (!problem) forward(*m, *args, threads);
  return problem;
}

const char* EXPORT(build_trees)(const Model* m, TreeArgs* args, int64_t threads) {
  if (const char* problem = invalid(*m, *args)) return problem;
  try {
    build_trees(*m, *args, threads);
  } catch (const std::bad_alloc&) { return "there is not enough memory"; }
  return nullptr;
}

// Bytes of a token's inputs that draftahead_linear needs memory for.
int64_t EXPORT(integer_bytes)(const Weights* w) { return integer_bytes(*w); }

// One linear layer, for models that draftahead_forward does not support. `integers`: memory for
// quantized inputs.
void EXPORT(linear)(const Weights* w, const float* x, int64_t num_tokens, float* y, int64_t threads,
                    uint8_t* integers) {
  linear_all_threads(*w, x, num_tokens, y, threads, integers);
}

// Writes rows `ids` as float32: [count][in_features]. Returns how many: all of them, or those
// before the first that is not there.
int64_t EXPORT(float_rows)(const Weights* w, const int64_t* ids, int64_t count, float* out) {
  const FloatRow float_row = float_row_of(w->kind);
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= w->out_features) return i;
    float_row(*w, ids[i], out + i * w->in_features);
  }
  return count;
}

// Bytes of a matrix in panels (panels.h); 0: its kind has none.
int64_t EXPORT(panels_size)(const Weights* w) {
  if (w->kind < Q4_0) return 0;
  return (w->out_features + PANEL_ROWS - 1) / PANEL_ROWS * panel_bytes(w->kind, w->in_features);
}

// Writes a matrix whose rows are at `data` in panels.
void EXPORT(make_panels)(const Weights* w, uint8_t* panels, int64_t threads) {
  parallel(threads, [&] {
    const Range mine = thread_range((w->out_features + PANEL_ROWS - 1) / PANEL_ROWS, 1);
    for (int64_t n = mine.begin; n < mine.end; n++)
      make_panel(*w, n, panels + n * panel_bytes(w->kind, w->in_features));
  });
}

// Reads memory and does nothing else: the memory-bandwidth bound that a forward is measured
// against.
float EXPORT(read_memory)(const float* data, int64_t count, int64_t threads) {
  std::atomic<float> total{0};
  parallel(threads, [&] {
    const Range mine = thread_range(count, 128);
    f32x16 acc[8] = {};
    for (int64_t i = mine.begin; i + 128 <= mine.end; i += 128)
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) acc[c] += load(data + i + 16 * c);
    float sum = 0, before = total;
    for (int c = 0; c < 8; c++) sum += sum_lanes(acc[c]);
    while (!total.compare_exchange_weak(before, before + sum)) {}
  });
  return total;
}

}  // extern "C"
