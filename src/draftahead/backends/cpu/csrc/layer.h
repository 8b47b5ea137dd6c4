// One decoder layer of a llama-shaped model: norm, attention, norm, feed-forward.

#pragma once

#include "attention.h"

namespace {

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

// Stores a node's key and value (of one KV head) in the cache; `k` and `v` themselves are not read
// again. Infinity and NaN of a drafted node become 0: masked, they would still make other nodes'
// results NaN (0 * NaN). Its own logits become NaN, as without drafts. Those of a context token
// stay, as the target's own result.
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

// act(gate(x)) * up(x): the same outputs of both, so that no barrier is needed before the product.
void gated_units(const Model& m, const DecoderLayer& layer, const Inputs& inputs,
                 int64_t num_tokens, SharedBuffers& b) {
  const int64_t size = m.intermediate_size;
  share(size, 48, [&](Range part) {
    linear_outputs(layer.gate, inputs, num_tokens, b.gate, size, part.begin, part.end,
                   Output::STORE);
    linear_outputs(layer.up, inputs, num_tokens, b.up, size, part.begin, part.end, Output::STORE);
    for (int64_t t = 0; t < num_tokens; t++)
      for (int64_t i = part.begin; i < part.end; i += 16) {
        float *gate = b.gate + t * size + i, *up = b.up + t * size + i;
        store(gate, activate(load(gate), m.activation) * load(up));
      }
  });
}

// Runs a layer over f.hidden, in place. Called by all threads; they meet before it returns.
void decoder_layer(const Model& m, const DecoderLayer& layer, const ForwardArgs& f,
                   SharedBuffers& b, ThreadBuffers& local) {
  const int64_t num_tokens = f.num_sequences * f.num_nodes;
  const bool has_own_input = f.first_input && &layer == m.layers;
  Inputs inputs = prepared(m, b, local, {&layer.q, &layer.k, &layer.v},
                           has_own_input ? f.first_input : f.hidden,
                           has_own_input ? nullptr : layer.input_norm, num_tokens);
  linear(layer.q, inputs, num_tokens, b.q, Output::STORE);
  linear(layer.k, inputs, num_tokens, b.k, Output::STORE);
  linear(layer.v, inputs, num_tokens, b.v, Output::STORE);
  barrier();
  rotate_and_store(m, layer, f, b);
  barrier();
  if (f.kv_only && &layer == m.layers + m.num_layers - 1) return;
  attention(m, layer, f, b, local);
  barrier();
  inputs = prepared(m, b, local, {&layer.o}, b.attention, nullptr, num_tokens);
  linear(layer.o, inputs, num_tokens, f.hidden, Output::ADD);
  barrier();
  inputs = prepared(m, b, local, {&layer.gate, &layer.up}, f.hidden, layer.post_attention_norm,
                    num_tokens);
  gated_units(m, layer, inputs, num_tokens, b);
  barrier();
  inputs = prepared(m, b, local, {&layer.down}, b.gate, nullptr, num_tokens);
  linear(layer.down, inputs, num_tokens, f.hidden, Output::ADD);
  barrier();
}

}  // namespace
