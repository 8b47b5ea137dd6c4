// One decoder layer of a llama-shaped model: norm, attention, norm, feed-forward.

#pragma once

#include "attention.h"

namespace {

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) squares = multiply_add(load(x + i), load(x + i), squares);
  float total = sum_lanes(squares);
  for (; i < size; i++) total += x[i] * x[i];
  float scale = 1.0f / std::sqrt(total / size + eps);
  for (i = 0; i + 16 <= size; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

// Rotary embedding in place: x * cos + rotate_half(x) * sin.
void rotate(float* x, const float* cos, const float* sin, int64_t head_dim) {
  int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

inline f32x16 activate(f32x16 x, int64_t activation) {
  if (activation == SILU) return x / (1.0f + fast_exp(-x));
  f32x16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + fast_exp(-2.0f * inner));
}

// Stores a node's key and value (of one KV head) in the cache, which they are not read from again.
// Infinity and NaN of a drafted node
// become 0: masked, they would still make other nodes' results NaN (0 * NaN). Its own logits become
// NaN, as without drafts. Those of a context token stay, as the target's own result.
void store_kv(const Model& m, const DecoderLayer& layer, const ForwardArgs& f, int64_t t,
              int64_t kv_head, float* k, float* v) {
  const int64_t d = m.head_dim, sequence = t / f.num_nodes, node = tree_node(f, t);
  const int64_t head = (f.first_slot + sequence) * m.num_kv_heads + kv_head;
  const int64_t at = (head * m.num_entries + f.num_cached[sequence] + node) * kv_row_size(m);
  bool overflows = false;
  for (int64_t i = 0; i < d && node >= f.num_context_tokens; i++) {
    overflows |= !is_storable(m, k[i]) || !is_storable(m, v[i]);
    if (!is_storable(m, k[i])) k[i] = 0.0f;
    if (!is_storable(m, v[i])) v[i] = 0.0f;
  }
  store_row(m, k, static_cast<char*>(layer.keys) + at);
  store_row(m, v, static_cast<char*>(layer.values) + at);
  float nan = NAN;  // the threads of several heads may store it
  if (overflows) __atomic_store(f.hidden + t * m.hidden_size, &nan, __ATOMIC_RELAXED);
}

// This thread's part of the new queries and keys: norms and rotates them, stores keys and values.
void rotate_and_store(const Model& m, const DecoderLayer& layer, const ForwardArgs& f,
                      SharedBuffers& b) {
  const int64_t d = m.head_dim, heads = m.num_heads + m.num_kv_heads;
  const Range mine = thread_range(f.num_sequences * f.num_nodes * heads, 1);
  for (int64_t job = mine.begin; job < mine.end; job++) {
    const int64_t t = job / heads, head = job % heads, kv_head = head - m.num_heads;
    const float *cos = f.cos + t * d, *sin = f.sin + t * d;
    if (kv_head < 0) {
      float* q = b.q + (t * m.num_heads + head) * d;
      if (layer.q_norm) rms_norm(q, layer.q_norm, m.norm_eps, d, q);
      rotate(q, cos, sin, d);
      if (m.kv_format == KV_INT8) mix(m, q);
    } else {
      float* k = b.k + (t * m.num_kv_heads + kv_head) * d;
      if (layer.k_norm) rms_norm(k, layer.k_norm, m.norm_eps, d, k);
      rotate(k, cos, sin, d);
      if (m.kv_format == KV_INT8) mix(m, k);
      store_kv(m, layer, f, t, kv_head, k, b.v + (t * m.num_kv_heads + kv_head) * d);
    }
  }
}

// This thread's part of act(gate(x)) * up(x): the same outputs of both, so that no barrier is
// needed before the product.
void gated_units(const Model& m, const DecoderLayer& layer, const Activations& a,
                 int64_t num_tokens, SharedBuffers& b) {
  const int64_t size = m.intermediate_size;
  const Range mine = thread_range(size, 48);
  if (mine.begin >= mine.end) return;
  linear_outputs(layer.gate, a, num_tokens, b.gate, size, mine.begin, mine.end, Output::STORE);
  linear_outputs(layer.up, a, num_tokens, b.up, size, mine.begin, mine.end, Output::STORE);
  for (int64_t t = 0; t < num_tokens; t++)
    for (int64_t i = mine.begin; i < mine.end; i += 16) {
      float *gate = b.gate + t * size + i, *up = b.up + t * size + i;
      store(gate, activate(load(gate), m.activation) * load(up));
    }
}

// Runs a layer over f.hidden, in place. Called by all threads; they meet before it returns.
void decoder_layer(const Model& m, const DecoderLayer& layer, const ForwardArgs& f,
                   SharedBuffers& b, ThreadBuffers& local) {
  const int64_t num_tokens = f.num_sequences * f.num_nodes, hidden_size = m.hidden_size;
  auto norm_all = [&](const float* weight) {
    for (int64_t t = 0; t < num_tokens; t++)
      rms_norm(f.hidden + t * hidden_size, weight, m.norm_eps, hidden_size,
               local.normed + t * hidden_size);
  };
  const bool has_own_input = f.first_input && &layer == m.layers;
  if (!has_own_input) norm_all(layer.input_norm);
  const float* input = has_own_input ? f.first_input : local.normed;
  Activations a = local.activations(layer.q, input, num_tokens);
  linear(layer.q, a, num_tokens, b.q, Output::STORE);
  linear(layer.k, a, num_tokens, b.k, Output::STORE);
  linear(layer.v, a, num_tokens, b.v, Output::STORE);
  b.barrier->wait();
  rotate_and_store(m, layer, f, b);
  b.barrier->wait();
  if (f.kv_only && &layer == m.layers + m.num_layers - 1) return;
  attention(m, layer, f, b, local);
  b.barrier->wait();
  a = local.activations(layer.o, b.attention, num_tokens);
  linear(layer.o, a, num_tokens, f.hidden, Output::ADD);
  b.barrier->wait();
  norm_all(layer.post_attention_norm);
  gated_units(m, layer, local.activations(layer.gate, local.normed, num_tokens), num_tokens, b);
  b.barrier->wait();
  a = local.activations(layer.down, b.gate, num_tokens);
  linear(layer.down, a, num_tokens, f.hidden, Output::ADD);
  b.barrier->wait();
}

}  // namespace
