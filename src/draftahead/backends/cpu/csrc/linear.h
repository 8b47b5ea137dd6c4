// Linear layers for a few tokens: each weight is loaded once and used for all of them.
//
// y[token][output] = bias[output] + sum over inputs of weight[output][input] * x[token][input]. The
// sum runs in an order that does not depend on the number of tokens or on a token's place among
// them.
//
//   encode_token:   inputs as integers, for weights that need them
//   linear_outputs: float_rows.h | panels.h | int8_groups.h

#pragma once

#include "float_rows.h"
#include "int8_groups.h"
#include "panels.h"

namespace {

// Inputs of a linear layer.
struct Inputs {
  const float* x;           // [num_tokens][in]
  const uint8_t* integers;  // [num_tokens][integer_bytes(w)], for weights that need them
};

inline bool has_panels(const Weights& w) { return w.panels && w.arithmetic != FLOAT32_INPUTS; }

// Bytes of a token's inputs as integers; 0: the weights take float32.
inline int64_t integer_bytes(const Weights& w) {
  if (w.kind == INT8) return int8_input_bytes(w);
  if (!has_panels(w)) return 0;
  return w.in_features / UNIT * (w.arithmetic == INT8_INPUTS ? sizeof(Unit<1>) : sizeof(Unit<3>));
}
// The same for any weights of so many inputs, at most.
inline int64_t max_integer_bytes(int64_t in) {
  return (in / UNIT + 1) * (sizeof(Unit<3>) + 63) / 64 * 64;
}

// Units of inputs that share a scale.
inline int64_t sharing_units(const Weights& w) {
  return w.arithmetic == INT8_INPUTS && is_k_kind(w.kind) ? 8 : 1;
}

// The inputs of one token.
inline void encode_token(const Weights& w, const float* x, uint8_t* integers) {
  if (w.kind == INT8) quantize_groups(w, x, integers);
  else if (w.arithmetic == INT8_INPUTS)
    quantize_units(x, w.in_features, sharing_units(w), reinterpret_cast<Unit<1>*>(integers));
  else quantize_units(x, w.in_features, sharing_units(w), reinterpret_cast<Unit<3>*>(integers));
}

// Outputs that a thread takes at least: each thread's part begins at a multiple of it.
inline int64_t output_unit(const Weights& w) {
  return w.kind == INT8 ? PANEL : has_panels(w) ? PANEL_ROWS : 24;
}

// Outputs [begin, end) of a linear layer; begin is a multiple of output_unit.
inline void linear_outputs(const Weights& w, const Inputs& inputs, int64_t num_tokens, float* y,
                           int64_t stride, int64_t begin, int64_t end, Output output) {
  if (num_tokens == 0 || begin >= end) return;
  if (w.kind == INT8) {
    int8_outputs(w, inputs.integers, num_tokens, y, stride, begin, end, output);
  } else if (has_panels(w)) {
    const bool is_int8 = w.arithmetic == INT8_INPUTS;
    const PanelOutputs outputs =
        is_int8 ? panel_outputs_of<1>(w.kind) : panel_outputs_of<3>(w.kind);
    outputs(w, inputs.integers, num_tokens, y, stride, begin, end, output);
  } else {
    float_outputs_of(w.kind)(w, inputs.x, num_tokens, y, stride, begin, end, output);
  }
}

}  // namespace
