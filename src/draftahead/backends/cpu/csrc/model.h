// What a pass is given: the model, its layers, the nodes; and what its threads share.

#pragma once

#include <atomic>
#include <omp.h>
#include <sched.h>

#include "linear.h"

extern "C" {

struct Layer {
  Weights q, k, v, o, gate, up, down;
  const float *input_norm, *after_norm, *q_norm, *k_norm;  // the last two may be null
  float *keys, *values;  // [cache rows][key heads][length][width]
  int64_t window;        // 0: none
  float scaling;
  float unused;
};

// See shortlist.h.
struct Shortlist {
  Weights sight;    // float32 [directions][hidden]
  Weights preview;  // int8 [vocabulary][directions]
  Weights rows;     // int8 [vocabulary][hidden], not in panels, and its scales likewise
  int64_t least;    // stretches of the vocabulary of which something is computed as it is
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden, heads, key_heads, width, inner, length, activation;
  const float* final_norm;
  Weights head;
  const Shortlist* shortlist;  // in place of the head, or null
  float eps;
  float unused;
};

// One pass over `rows` texts of `nodes` new nodes each.
constexpr int TOP = 4;

struct Pass {
  int64_t rows, nodes, first;  // first: of the cache's rows
  int64_t real;                // nodes of a row that belong to its text; behind them are guesses
  const int64_t* lengths;      // [rows] keys each text has already
  int64_t block;               // nodes a row, if these are only some of them
  const int64_t* which;        // [rows][nodes] which of the block these are, or null: all of it
  const int32_t* depths;       // [rows][block]
  const uint64_t* ancestors;   // [rows][block] bit m: node m leads to this one, itself included
  const float *cos, *sin;      // [rows][nodes][width]
  const float* seen;           // [rows][nodes][inputs of the first q], or null: the normed x
  int64_t keys_only;           // of the last layer: what follows them is of no use
  float* x;                    // [rows][nodes][hidden]: embeddings in, the last layer's states out
  float* logits;               // [rows][nodes][vocabulary], or null if only the keys are wanted
  int64_t watched;             // states that are asked for
  const int64_t* watch;        // [watched] after so many layers, ascending; after all: normed
  float* states;               // [rows][nodes][watched][hidden]
  int64_t* top;                // [rows][nodes][TOP] the likeliest tokens, where logits are wanted
  float* scratch;              // of draftahead_scratch(...) floats
};

}  // extern "C"

namespace {

// Threads meet here between the stages of a pass. OpenMP's own barrier spins for milliseconds; on a
// busy machine that keeps the thread that is waited for off its core. This one soon steps aside.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int tries = 0; phase_.load(std::memory_order_acquire) == phase; tries++)
      if (tries > 4000) sched_yield();
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0}, phase_{0};
};

// This thread's share of `count` things, in whole multiples of `unit`.
inline void share(int64_t count, int64_t unit, int64_t& from, int64_t& to) {
  int64_t threads = omp_get_num_threads(), units = (count + unit - 1) / unit;
  int64_t each = (units + threads - 1) / threads * unit;
  from = each * omp_get_thread_num();
  to = from + each < count ? from + each : count;
  if (from > count) from = to = count;
}

// Which node of its row's block the t-th of a pass is.
inline int64_t in_block(const Pass& p, int64_t t) { return p.which ? p.which[t] : t % p.nodes; }

constexpr int64_t MOST_QUERIES = 16;  // that share the reading of keys and values

int64_t rounded(int64_t n) { return (n + 15) / 16 * 16; }

// What the threads of a pass share.
struct Buffers {
  float *q, *k, *v, *mixed, *inner, *other;
  Barrier* barrier;
};

int64_t widest_input(const Model& m) {
  int64_t widest = m.inner > m.hidden ? m.inner : m.hidden;
  if (m.heads * m.width > widest) widest = m.heads * m.width;
  if (m.layer_count && m.layers[0].q.in > widest) widest = m.layers[0].q.in;
  return widest;
}

int64_t private_size(const Model& m, int64_t count) {
  int64_t widest = widest_input(m);
  int64_t norm = rounded(count * m.hidden);
  int64_t quantized = rounded(count * widest / 4) + 2 * rounded(count * widest / CHUNK);
  return norm + quantized + MOST_QUERIES * rounded(m.length + 64) + 64;
}

// Each thread prepares all rows for itself: they are few, and no barrier is needed.
struct Private {
  float* norm;
  int8_t* q;
  float* scales;
  int32_t* start;
  float* scores;

  Private(const Model& m, int64_t count, float* at) {
    int64_t widest = widest_input(m);
    norm = at;
    at += rounded(count * m.hidden);
    q = reinterpret_cast<int8_t*>(at);
    at += rounded(count * widest / 4);
    scales = at;
    at += rounded(count * widest / CHUNK);
    start = reinterpret_cast<int32_t*>(at);
    at += rounded(count * widest / CHUNK);
    scores = at;
  }

  Rows rows_for(const Weights& w, const float* x, int64_t count) {
    Rows rows = {x, count > 1 ? w.in : 0, q, scales, start};
    if (w.scales)
      for (int64_t r = 0; r < count; r++)
        quantize_row(x + r * w.in, w.in, w.group, q + r * w.in, scales + r * (w.in / w.group),
                     start + r * (w.in / w.group));
    return rows;
  }
};

void linear_shared(const Weights& w, const Rows& rows, int64_t count, float* y, Then then) {
  int64_t from, to;
  share(w.out, w.scales ? PANEL : 24, from, to);
  if (from < to) linear_part(w, rows, count, y, w.out, from, to, then);
}

}  // namespace
