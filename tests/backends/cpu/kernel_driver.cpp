// Calls the kernels without Python, where there is none: under an emulator of another CPU. See
// test_neon.py.
//
//   kernel_driver isas                 the instruction sets of the CPU
//   kernel_driver linear THREADS       linear layers from stdin, outputs to stdout
//   kernel_driver forward THREADS      forwards of a small model, logits to stdout

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi.h"

#define JOINED(name, isa) draftahead_##name##_##isa
#define NAME(name, isa) JOINED(name, isa)
#define KERNEL(name) NAME(name, KERNEL_ISA)

extern "C" {
const char* draftahead_isas();
int64_t KERNEL(scratch_size)(const Model*, int64_t, int64_t);
const char* KERNEL(forward)(const Model*, const ForwardArgs*, int64_t);
int64_t KERNEL(integer_bytes)(const Weights*);
void KERNEL(linear)(const Weights*, const float*, int64_t, float*, int64_t, uint8_t*);
int64_t KERNEL(panels_size)(const Weights*);
void KERNEL(make_panels)(const Weights*, uint8_t*, int64_t);
}

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(count);
  if (fread(values.data(), sizeof(T), count, stdin) != size_t(count)) exit(3);
  return values;
}

void write(const std::vector<float>& values) {
  fwrite(values.data(), sizeof(float), values.size(), stdout);
}

// Each request: kind, arithmetic, outputs, inputs, tokens, group size, bytes of data, numbers of
// scales; then data, scales, bias, x.
void linear(int64_t threads) {
  for (int64_t h[8]; fread(h, sizeof h, 1, stdin) == 1;) {
    const std::vector<uint8_t> data = read<uint8_t>(h[6]);
    const std::vector<float> scales = read<float>(h[7]), bias = read<float>(h[2]);
    const std::vector<float> x = read<float>(h[3] * h[4]);
    Weights w = {};
    w.data = data.data(), w.bias = bias.data(), w.out_features = h[2], w.in_features = h[3];
    w.scales = scales.data(), w.group_size = h[5], w.kind = h[0], w.arithmetic = h[1];
    std::vector<uint8_t> panels(w.arithmetic ? KERNEL(panels_size)(&w) : 0);
    if (w.arithmetic) {
      KERNEL(make_panels)(&w, panels.data(), threads);
      w.panels = panels.data();
    }
    // Room behind the inputs, and on a line of the cache, as in Python.
    std::vector<uint8_t> integers(KERNEL(integer_bytes)(&w) * h[4] + 128);
    uint8_t* aligned = integers.data() + (64 - reinterpret_cast<uintptr_t>(integers.data()) % 64);
    std::vector<float> y(h[2] * h[4]);
    KERNEL(linear)(&w, x.data(), h[4], y.data(), threads, aligned);
    write(y);
  }
}

constexpr int64_t HIDDEN = 96, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 32, INNER = 144, VOCAB = 101;
constexpr int64_t LAYERS = 2, ENTRIES = 64, CONTEXT = 19, NODES = 7;

// Numbers in (-1, 1) that are the same everywhere.
float number() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(state >> 40) - (1 << 23)) / float(1 << 23);
}
std::vector<float>& numbers(int64_t count, float scale, float offset = 0) {
  std::vector<float>& values = *new std::vector<float>(count);
  for (float& value : values) value = scale * number() + offset;
  return values;
}
Weights weights(int64_t out, int64_t in) {
  Weights w = {};
  w.data = numbers(out * in, 2.0f / std::sqrt(float(in))).data(),
  w.bias = numbers(out, 0.1f).data();
  w.out_features = out, w.in_features = in;
  return w;
}

// Logits of `nodes` nodes at once, behind `cached` entries.
void forward(const Model& model, const float* inputs, int64_t cached, int64_t nodes,
             int64_t threads, std::vector<float>* logits) {
  std::vector<float> hidden(inputs + cached * HIDDEN, inputs + (cached + nodes) * HIDDEN);
  std::vector<float> cos(nodes * HEAD_DIM), sin(nodes * HEAD_DIM), found(nodes * VOCAB);
  std::vector<int32_t> depths(nodes);
  std::vector<uint64_t> ancestors(nodes);
  for (int64_t t = 0; t < nodes; t++) {
    depths[t] = t, ancestors[t] = (uint64_t(2) << t) - 1;
    for (int64_t i = 0; i < HEAD_DIM; i++) {
      const double angle = (cached + t) * std::pow(10000.0, -double(i % 16) / 16);
      cos[t * HEAD_DIM + i] = std::cos(angle), sin[t * HEAD_DIM + i] = std::sin(angle);
    }
  }
  std::vector<float> scratch(KERNEL(scratch_size)(&model, nodes, threads));
  ForwardArgs f = {};
  f.num_sequences = 1, f.num_nodes = f.tree_size = nodes, f.num_context_tokens = nodes;
  f.num_cached = &cached, f.depths = depths.data(), f.ancestors = ancestors.data();
  f.cos = cos.data(), f.sin = sin.data(), f.hidden = hidden.data(), f.logits = found.data();
  f.scratch = scratch.data();
  if (const char* problem = KERNEL(forward)(&model, &f, threads)) fputs(problem, stderr), exit(4);
  if (logits) logits->insert(logits->end(), found.begin(), found.end());
}

// Two lists of logits of the same nodes: all nodes at once, then one after the other.
void forwards(int64_t threads) {
  DecoderLayer layers[LAYERS] = {};
  for (DecoderLayer& layer : layers) {
    layer.q = weights(HEADS * HEAD_DIM, HIDDEN), layer.k = weights(KV_HEADS * HEAD_DIM, HIDDEN);
    layer.v = weights(KV_HEADS * HEAD_DIM, HIDDEN), layer.o = weights(HIDDEN, HEADS * HEAD_DIM);
    layer.gate = weights(INNER, HIDDEN), layer.up = weights(INNER, HIDDEN);
    layer.down = weights(HIDDEN, INNER);
    layer.input_norm = numbers(HIDDEN, 0.2f, 1).data();
    layer.post_attention_norm = numbers(HIDDEN, 0.2f, 1).data();
    layer.keys = numbers(KV_HEADS * ENTRIES * HEAD_DIM, 1).data();
    layer.values = numbers(KV_HEADS * ENTRIES * HEAD_DIM, 1).data();
    layer.scaling = 1 / std::sqrt(float(HEAD_DIM));
  }
  Model model = {};
  model.layers = layers, model.num_layers = LAYERS, model.hidden_size = HIDDEN;
  model.num_heads = HEADS, model.num_kv_heads = KV_HEADS, model.head_dim = HEAD_DIM;
  model.first_input_size = HIDDEN, model.intermediate_size = INNER, model.num_slots = 1;
  model.num_entries = ENTRIES, model.activation = SILU, model.norm_eps = 1e-5f;
  model.final_norm = numbers(HIDDEN, 0.2f, 1).data(), model.lm_head = weights(VOCAB, HIDDEN);
  const float* inputs = numbers((CONTEXT + NODES) * HIDDEN, 1).data();
  std::vector<float> logits;
  forward(model, inputs, 0, CONTEXT, threads, nullptr);
  forward(model, inputs, CONTEXT, NODES, threads, &logits);
  for (int64_t t = 0; t < NODES; t++) forward(model, inputs, CONTEXT + t, 1, threads, &logits);
  write(logits);
}

int main(int count, char** arguments) {
  const int64_t threads = count > 2 ? atoi(arguments[2]) : 1;
  if (count < 2) return 2;
  if (!strcmp(arguments[1], "isas")) puts(draftahead_isas());
  else if (!strcmp(arguments[1], "linear")) linear(threads);
  else forwards(threads);
  return 0;
}
