// Small-row kernels for the CPU, and one pass of a llama-shaped decoder made of them.
//
// Decoding reads every weight once a pass, so a pass over 8 rows should cost what one row costs.
// A weight is therefore loaded once and used for all rows while it is in a register. Every sum runs
// in an order that does not depend on how many rows there are, or where a row stands among them:
// a token's logits are the same bits as a root, as a guess, and with any batch mates.

#include <cmath>

#include "attention.h"
#include "grow.h"
#include "linear.h"
#include "model.h"
#include "shortlist.h"

namespace {

// --------------------------------------------------------------------------- between the layers

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* y) {
  f16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) squares = fused(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  float scale = 1.0f / std::sqrt(total / width + eps);
  for (i = 0; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

// x * cos + rotate_half(x) * sin, in place.
void rotate(float* x, const float* cos, const float* sin, int64_t width) {
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

inline f16 activate(f16 x, int kind) {
  if (kind == SILU) return x / (1.0f + exp16(-x));
  f16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp16(-2.0f * inner));
}

// Normalises and rotates new queries and keys, and puts the keys and values into the cache.
void place_keys(const Model& m, const Layer& l, const Pass& p, Buffers& b) {
  const int64_t count = p.rows * p.nodes, d = m.width;
  int64_t from, to;
  share(count * (m.heads + m.key_heads), 1, from, to);
  for (int64_t job = from; job < to; job++) {
    int64_t t = job / (m.heads + m.key_heads), h = job % (m.heads + m.key_heads);
    const float *cos = p.cos + t * d, *sin = p.sin + t * d;
    if (h < m.heads) {
      float* q = b.q + (t * m.heads + h) * d;
      if (l.q_norm) rms_norm(q, l.q_norm, m.eps, d, q);
      rotate(q, cos, sin, d);
      continue;
    }
    h -= m.heads;
    float *k = b.k + (t * m.key_heads + h) * d, *v = b.v + (t * m.key_heads + h) * d;
    if (l.k_norm) rms_norm(k, l.k_norm, m.eps, d, k);
    rotate(k, cos, sin, d);
    int64_t row = t / p.nodes, node = in_block(p, t);
    int64_t slot = p.lengths[row] + node;
    int64_t at = (((p.first + row) * m.key_heads + h) * m.length + slot) * d;
    std::memcpy(l.keys + at, k, d * sizeof(float));
    std::memcpy(l.values + at, v, d * sizeof(float));
    if (node < p.real) continue;
    for (int64_t i = 0; i < d; i++) {  // see CacheWindow in kvcache.py
      if (!std::isfinite(k[i])) l.keys[at + i] = 0.0f;
      if (!std::isfinite(v[i])) l.values[at + i] = 0.0f;
    }
  }
}

void run_layer(const Model& m, const Layer& l, const Pass& p, Buffers& b, Private& mine) {
  const int64_t count = p.rows * p.nodes;
  int64_t from, to;
  const bool is_fed = p.seen && &l == m.layers;
  if (!is_fed)
    for (int64_t r = 0; r < count; r++)
      rms_norm(p.x + r * m.hidden, l.input_norm, m.eps, m.hidden, mine.norm + r * m.hidden);
  Rows rows = mine.rows_for(l.q, is_fed ? p.seen : mine.norm, count);
  linear_shared(l.q, rows, count, b.q, Then::Store);
  linear_shared(l.k, rows, count, b.k, Then::Store);
  linear_shared(l.v, rows, count, b.v, Then::Store);
  b.barrier->wait();
  place_keys(m, l, p, b);
  b.barrier->wait();
  if (p.keys_only && &l == m.layers + m.layer_count - 1) return;
  attend_shared(m, l, p, b, mine);
  b.barrier->wait();
  linear_shared(l.o, mine.rows_for(l.o, b.mixed, count), count, p.x, Then::AddTo);
  b.barrier->wait();
  for (int64_t r = 0; r < count; r++)
    rms_norm(p.x + r * m.hidden, l.after_norm, m.eps, m.hidden, mine.norm + r * m.hidden);
  rows = mine.rows_for(l.gate, mine.norm, count);
  share(m.inner, 48, from, to);
  if (from < to) {
    // Gate and up for the same outputs, so that their product needs no barrier.
    float* other = b.other;
    linear_part(l.gate, rows, count, b.inner, m.inner, from, to, Then::Store);
    linear_part(l.up, rows, count, other, m.inner, from, to, Then::Store);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = from; i < to; i += 16) {
        float *g = b.inner + r * m.inner + i, *u = other + r * m.inner + i;
        store(g, activate(load(g), m.activation) * load(u));
      }
  }
  b.barrier->wait();
  linear_shared(l.down, mine.rows_for(l.down, b.inner, count), count, p.x, Then::AddTo);
  b.barrier->wait();
}

// Copies the rows' states after `done` layers to whoever watches them; each thread some of them.
void show(const Model& m, const Pass& p, int64_t count, int64_t done, const float* from_rows) {
  for (int64_t w = 0; w < p.watched; w++) {
    if (p.watch[w] != done) continue;
    int64_t from, to;
    share(count, 1, from, to);
    for (int64_t r = from; r < to; r++)
      std::memcpy(p.states + (r * p.watched + w) * m.hidden, from_rows + r * m.hidden,
                  m.hidden * sizeof(float));
  }
}

// ------------------------------------------------------------------------------ behind the head

// The largest of a row, the first of equals first; -1 in place of the first where a choice makes no
// sense (NaN, or nothing finite). Blocks whose maximum does not count are passed over.
void top_of(const float* x, int64_t width, int64_t* ids) {
  constexpr int64_t block = 256;
  float values[TOP];
  for (int k = 0; k < TOP; k++) values[k] = -INFINITY, ids[k] = -1;
  i16 odd = {};
  for (int64_t from = 0; from < width; from += block) {
    int64_t to = from + block < width ? from + block : width, i = from;
    f16 most = all(-INFINITY);
    for (; i + 16 <= to; i += 16) {
      f16 v = load(x + i);
      odd |= v != v;
      most = v > most ? v : most;
    }
    float peak = biggest(most);
    for (; i < to; i++) {
      if (x[i] != x[i]) odd = odd | -1;
      peak = x[i] > peak ? x[i] : peak;
    }
    if (!(peak > values[TOP - 1])) continue;
    for (i = from; i < to; i++) {
      if (!(x[i] > values[TOP - 1])) continue;
      int k = TOP - 1;
      for (; k > 0 && x[i] > values[k - 1]; k--) values[k] = values[k - 1], ids[k] = ids[k - 1];
      values[k] = x[i], ids[k] = i;
    }
  }
  bool is_odd = std::isinf(values[0]);
  for (int lane = 0; lane < 16; lane++) is_odd |= odd[lane] != 0;
  if (is_odd) ids[0] = -1;
}

}  // namespace

extern "C" {

int64_t draftahead_scratch(const Model* m, int64_t count, int64_t threads) {
  int64_t shared = rounded(count * m->heads * m->width) * 2 +
                   rounded(count * m->key_heads * m->width) * 2 + rounded(count * m->inner) * 2;
  return shared + threads * private_size(*m, count) + 64;
}

void draftahead_pass(const Model* m, const Pass* p, int64_t threads) {
  const int64_t count = p->rows * p->nodes;
  float* at = p->scratch;
  auto take = [&](int64_t n) { float* here = at; at += rounded(n); return here; };
  Buffers b;
  b.q = take(count * m->heads * m->width);
  b.mixed = take(count * m->heads * m->width);
  b.k = take(count * m->key_heads * m->width);
  b.v = take(count * m->key_heads * m->width);
  b.inner = take(count * m->inner);
  b.other = take(count * m->inner);
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    b.barrier = new Barrier(omp_get_num_threads());  // which may be fewer than asked for
    Private mine(*m, count, at + omp_get_thread_num() * private_size(*m, count));
    for (int64_t i = 0; i < m->layer_count; i++) {
      if (i) show(*m, *p, count, i, p->x);  // x stays as it is until the threads have met again
      run_layer(*m, m->layers[i], *p, b, mine);
    }
    if (p->logits) {
      for (int64_t r = 0; r < count; r++)
        rms_norm(p->x + r * m->hidden, m->final_norm, m->eps, m->hidden, mine.norm + r * m->hidden);
      show(*m, *p, count, m->layer_count, mine.norm);
      const Shortlist* s = m->shortlist;
      const float* sight = mine.norm;
      if (s) {
        linear_shared(s->sight, mine.rows_for(s->sight, mine.norm, count), count, b.q, Then::Store);
        b.barrier->wait();
        sight = b.q;
      }
      const Weights& head = s ? s->preview : m->head;
      linear_shared(head, mine.rows_for(head, sight, count), count, p->logits, Then::Store);
      b.barrier->wait();
      int64_t from, to;
      share(count, 1, from, to);
      Rows rows = {};
      if (s && from < to) rows = mine.rows_for(s->rows, mine.norm, count);
      for (int64_t r = from; r < to; r++) {
        float* logits = p->logits + r * m->head.out;
        if (s) sharpen(*s, rows, r, logits);
        top_of(logits, m->head.out, p->top + r * TOP);
      }
    }
  }
  delete b.barrier;
}

// Returns how many levels were computed. `m`: the head, over its own cache.
int64_t draftahead_grow(const Model* m, Growth* g, int64_t threads) {
  const int64_t hidden = m->hidden, width = m->width, spoken = m->head.out;
  const double begin = omp_get_wtime();
  std::vector<float> roots(g->rows * hidden), root_logits(g->rows * spoken);
  read_pairs(*m, *g, threads, roots, root_logits);
  g->pairs_seconds = omp_get_wtime() - begin;
  std::vector<Tree> trees(g->rows);
  for (int64_t r = 0; r < g->rows; r++) {
    Tree& tree = trees[r];
    tree.nodes.push_back({-1, -1, 0, 1.0f, -1});
    tree.expand(0);
    float* out = roots.data() + r * hidden;
    if (g->norms_output) rms_norm(out, m->final_norm, m->eps, hidden, out);
    tree.outputs.assign(out, out + hidden);
    if (g->rooms[r] > 0) branch(*g, spoken, root_logits.data() + r * spoken, tree, 0);
  }
  const int64_t most = g->rows * g->a_level;
  std::vector<float> x(most * hidden), seen(most * 2 * hidden), logits(most * spoken);
  std::vector<float> cos(most * width), sin(most * width);
  std::vector<float> scratch(draftahead_scratch(m, most, threads));
  std::vector<int64_t> top(most * TOP), which(most);
  int64_t levels = 0;
  for (; levels + 1 < g->deepest; levels++) {
    std::vector<std::vector<int64_t>> frontier;
    int64_t nodes = 0, block = 0;
    float reached = 0;
    for (int64_t r = 0; r < g->rows; r++) {
      frontier.push_back(trees[r].frontier(g->rooms[r], g->a_level));
      for (int64_t node : frontier[r]) reached += trees[r].nodes[node].likely;
      nodes = std::max(nodes, int64_t(frontier[r].size()));
    }
    if (!nodes || reached <= g->enough) break;
    for (int64_t r = 0; r < g->rows; r++) {
      for (int64_t node : frontier[r]) trees[r].expand(node);
      block = std::max(block, int64_t(trees[r].depths.size()) + 1);
    }
    std::vector<int32_t> depths(g->rows * block, 1);
    std::vector<uint64_t> ancestors(g->rows * block, 1);
    for (int64_t r = 0; r < g->rows; r++) {
      Tree& tree = trees[r];
      std::copy(tree.depths.begin(), tree.depths.end(), depths.begin() + r * block);
      std::copy(tree.ancestors.begin(), tree.ancestors.end(), ancestors.begin() + r * block);
      for (int64_t j = 0; j < nodes; j++) {
        const int64_t t = r * nodes + j, size = frontier[r].size();
        // A row with fewer nodes than others is filled up with one that is of no use, behind them.
        const int64_t spare = tree.depths.size();
        ancestors[r * block + spare] = 1 | uint64_t(1) << spare;
        const Node n = j < size ? tree.nodes[frontier[r][j]] : Node{0, 0, 1, 0, spare};
        which[t] = n.place;
        const float* before = tree.outputs.data() + tree.nodes[n.parent].place * hidden;
        enter(*m, *g, n.token, before, seen.data() + t * 2 * hidden, x.data() + t * hidden);
        const int64_t at = g->bases[r] + n.depth;
        std::copy_n(g->cos + at * width, width, cos.data() + t * width);
        std::copy_n(g->sin + at * width, width, sin.data() + t * width);
      }
    }
    Pass p = {};
    p.rows = g->rows, p.nodes = nodes, p.lengths = g->bases, p.block = block;
    p.which = which.data(), p.depths = depths.data(), p.ancestors = ancestors.data();
    p.cos = cos.data(), p.sin = sin.data(), p.seen = seen.data(), p.x = x.data();
    p.logits = logits.data(), p.top = top.data(), p.scratch = scratch.data();
    draftahead_pass(m, &p, threads);
    for (int64_t r = 0; r < g->rows; r++) {
      Tree& tree = trees[r];
      for (int64_t j = 0; j < int64_t(frontier[r].size()); j++) {
        float* out = x.data() + (r * nodes + j) * hidden;
        if (g->norms_output) rms_norm(out, m->final_norm, m->eps, hidden, out);
        tree.outputs.insert(tree.outputs.end(), out, out + hidden);
      }
      for (int64_t j = 0; j < int64_t(frontier[r].size()); j++)
        branch(*g, spoken, logits.data() + (r * nodes + j) * spoken, tree, frontier[r][j]);
    }
  }
  for (int64_t r = 0; r < g->rows; r++) {
    const Tree& tree = trees[r];
    g->sizes[r] = tree.nodes.size();
    for (int64_t i = 0; i < g->sizes[r]; i++) {
      g->said[r * g->most + i] = tree.nodes[i].token;
      g->above[r * g->most + i] = tree.nodes[i].parent;
      g->likely[r * g->most + i] = tree.nodes[i].likely;
    }
  }
  return levels;
}

// One linear layer, for models whose shape the pass above does not know.
void draftahead_linear(const Weights* w, const float* x, int64_t count, float* y, int64_t threads,
                       int8_t* q, float* scales, int32_t* start) {
  Rows rows = {x, count > 1 ? w->in : 0, q, scales, start};
#pragma omp parallel num_threads(threads)
  {
    if (w->scales) {
#pragma omp for
      for (int64_t r = 0; r < count; r++)
        quantize_row(x + r * w->in, w->in, w->group, q + r * w->in, scales + r * (w->in / w->group),
                     start + r * (w->in / w->group));
    }
    linear_shared(*w, rows, count, y, Then::Store);
  }
}

// Reads memory and does nothing else: the limit that every pass is measured against.
float draftahead_read(const float* data, int64_t count, int64_t threads) {
  float found = 0;
#pragma omp parallel num_threads(threads) reduction(+ : found)
  {
    int64_t from, to;
    share(count, 128, from, to);
    f16 acc[8] = {};
    for (int64_t i = from; i + 128 <= to; i += 128)
#pragma GCC unroll 8
      for (int c = 0; c < 8; c++) acc[c] += load(data + i + 16 * c);
    for (int c = 0; c < 8; c++) found += sum(acc[c]);
  }
  return found;
}

}  // extern "C"
