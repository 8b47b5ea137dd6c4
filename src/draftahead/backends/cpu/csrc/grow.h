// Trees of guesses that a head grows, level by level, without leaving for Python in between: a level
// takes less than a millisecond, and half of it would go there. The same tree as growth.py's.

#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

extern "C" {

// What the head lacks of some texts: tokens, each beside the target's states before it.
struct Pairs {
  const float* states;         // [cache rows][slots][stride] of the target
  int64_t slots, stride;
  int64_t parts, width;        // states of a token that are fused, and numbers of each
  const int64_t* places;       // [parts] which of those in a slot
  int64_t norm;                // of them: none, each by itself, or all as one
  const float* norms;          // [parts][width]
  Weights fuse;
  int64_t most;                // of a row
  const int64_t* counts;       // [rows]; the last pair is the root
  const int64_t* tokens;       // [rows][most]
};

struct Growth {
  int64_t rows, deepest, a_level, children;
  float least;                 // likelihood below which a guess is not kept
  float enough;                // likelihood that a level must have reached to be worth its time
  const int64_t *bases, *rooms;  // [rows] slot of the root; how deep a tree may be
  const int64_t* tokens;       // [draft vocabulary] -> the target's, or null: the same
  const float* embeddings;     // [target's vocabulary][hidden]
  const float *embed_norm, *hidden_norm;
  int64_t norms_residual, norms_output;
  const float *cos, *sin;      // [slots][width]
  const Pairs* pairs;
  int64_t most;                // nodes a row that the lists below have room for
  int64_t* sizes;              // [rows] nodes, the root included
  int64_t *said, *above;       // [rows][most]
  float* likely;               // [rows][most] to be reached and right
  double pairs_seconds;        // what the pairs took
};

void draftahead_linear(const Weights* w, const float* x, int64_t count, float* y, int64_t threads,
                       int8_t* q, float* scales, int32_t* start);
void draftahead_pass(const Model* m, const Pass* p, int64_t threads);
int64_t draftahead_scratch(const Model* m, int64_t count, int64_t threads);

}  // extern "C"

namespace {

struct Node {
  int64_t token, parent, depth;
  float likely;
  int64_t place;  // among those it went on from, or -1
};

struct Tree {
  std::vector<Node> nodes;
  std::vector<int32_t> depths;      // of the nodes it went on from, by place
  std::vector<uint64_t> ancestors;  // of the same, as bits
  std::vector<float> outputs;       // of the same, [hidden] each

  // The likeliest nodes that can have children and have none, in order.
  std::vector<int64_t> frontier(int64_t room, int64_t most) const {
    std::vector<int64_t> found;
    for (int64_t i = 1; i < int64_t(nodes.size()); i++)
      if (nodes[i].place < 0 && nodes[i].depth < room) found.push_back(i);
    std::stable_sort(found.begin(), found.end(),
                     [&](int64_t a, int64_t b) { return nodes[a].likely > nodes[b].likely; });
    if (int64_t(found.size()) > most) found.resize(most);
    std::sort(found.begin(), found.end());
    return found;
  }

  void expand(int64_t node) {
    Node& n = nodes[node];
    n.place = depths.size();
    uint64_t before = node ? ancestors[nodes[n.parent].place] : 0;
    depths.push_back(n.depth);
    ancestors.push_back(before | uint64_t(1) << n.place);
  }
};

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* y);

// What the first layer looks at, and what its residual starts from: a token's embedding beside the
// feature or output before it.
void enter(const Model& m, const Growth& g, int64_t token, const float* before, float* seen,
           float* x) {
  rms_norm(g.embeddings + token * m.hidden, g.embed_norm, m.eps, m.hidden, seen);
  rms_norm(before, g.hidden_norm, m.eps, m.hidden, seen + m.hidden);
  std::copy_n(g.norms_residual ? seen + m.hidden : before, m.hidden, x);
}

enum Norm { NONE = 0, EACH = 1, ALL = 2 };

// The states of all pairs side by side, normed: [rows][most][parts * width].
std::vector<float> joined(const Model& m, const Growth& g) {
  const Pairs& p = *g.pairs;
  const int64_t wide = p.parts * p.width;
  std::vector<float> found(g.rows * p.most * wide);
  for (int64_t r = 0; r < g.rows; r++)
    for (int64_t i = 0; i < p.counts[r]; i++) {
      const int64_t slot = g.bases[r] - p.counts[r] + 1 + i;
      const float* from = p.states + (r * p.slots + slot) * p.stride;
      float* to = found.data() + (r * p.most + i) * wide;
      for (int64_t k = 0; k < p.parts; k++) {
        std::copy_n(from + p.places[k] * p.width, p.width, to + k * p.width);
        if (p.norm == EACH) {
          float* part = to + k * p.width;
          rms_norm(part, p.norms + k * p.width, m.eps, p.width, part);
        }
      }
      if (p.norm == ALL) rms_norm(to, p.norms, m.eps, wide, to);
    }
  return found;
}

// Feeds the head what it lacks. Leaves what it makes of every row's last pair, [rows][hidden], and
// the logits there.
void read_pairs(const Model& m, const Growth& g, int64_t threads, std::vector<float>& outputs,
                std::vector<float>& logits) {
  const Pairs& pairs = *g.pairs;
  const int64_t hidden = m.hidden, width = m.width, most = pairs.most, count = g.rows * most;
  std::vector<float> states = joined(m, g), features(count * hidden);
  const Weights& fuse = pairs.fuse;
  const int64_t groups = fuse.scales ? fuse.in / fuse.group : 0;
  std::vector<int8_t> q(groups ? count * fuse.in : 0);
  std::vector<float> scales(count * groups);
  std::vector<int32_t> start(count * groups);
  draftahead_linear(&fuse, states.data(), count, features.data(), threads, q.data(), scales.data(),
                    start.data());
  std::vector<float> x(count * hidden), seen(count * 2 * hidden);
  std::vector<float> cos(count * width), sin(count * width);
  std::vector<int32_t> depths(count);
  std::vector<uint64_t> ancestors(count);
  std::vector<int64_t> lengths(g.rows), top(g.rows * TOP);
  for (int64_t r = 0; r < g.rows; r++) {
    lengths[r] = g.bases[r] - pairs.counts[r] + 1;
    for (int64_t i = 0; i < most; i++) {  // those behind a row's own are of no use
      const int64_t t = r * most + i;
      enter(m, g, pairs.tokens[t], features.data() + t * hidden, seen.data() + t * 2 * hidden,
            x.data() + t * hidden);
      std::copy_n(g.cos + (lengths[r] + i) * width, width, cos.data() + t * width);
      std::copy_n(g.sin + (lengths[r] + i) * width, width, sin.data() + t * width);
      depths[t] = i;
      ancestors[t] = (uint64_t(2) << i) - 1;
    }
  }
  std::vector<float> scratch(draftahead_scratch(&m, count, threads));
  Pass p = {};
  p.rows = g.rows, p.nodes = most, p.lengths = lengths.data(), p.block = most;
  p.depths = depths.data(), p.ancestors = ancestors.data();
  p.cos = cos.data(), p.sin = sin.data(), p.seen = seen.data(), p.x = x.data();
  p.scratch = scratch.data();
  draftahead_pass(&m, &p, threads);
  for (int64_t r = 0; r < g.rows; r++)
    std::copy_n(x.data() + (r * most + pairs.counts[r] - 1) * hidden, hidden,
                outputs.data() + r * hidden);
  // Logits of the roots alone: a pass without layers.
  Model last = m;
  last.layer_count = 0;
  p.nodes = p.block = 1, p.x = outputs.data(), p.logits = logits.data(), p.top = top.data();
  draftahead_pass(&last, &p, threads);
}

// Children of a node: the likeliest tokens by these logits.
void branch(const Growth& g, int64_t width, const float* logits, Tree& tree, int64_t node) {
  constexpr int MOST = 16;
  float values[MOST];
  int64_t ids[MOST], count = g.children < MOST ? g.children : MOST;
  for (int64_t k = 0; k < count; k++) values[k] = -INFINITY, ids[k] = -1;
  for (int64_t i = 0; i < width; i++) {
    if (!(logits[i] > values[count - 1])) continue;
    int64_t k = count - 1;
    for (; k > 0 && logits[i] > values[k - 1]; k--) values[k] = values[k - 1], ids[k] = ids[k - 1];
    values[k] = logits[i], ids[k] = i;
  }
  if (!std::isfinite(values[0])) return;
  f16 total = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) total += exp16(load(logits + i) - values[0]);
  float all_of_them = sum(total);
  for (; i < width; i++) all_of_them += std::exp(logits[i] - values[0]);
  if (!std::isfinite(all_of_them)) return;
  const Node parent = tree.nodes[node];
  for (int64_t k = 0; k < count && ids[k] >= 0; k++) {
    float likely = parent.likely * std::exp(values[k] - values[0]) / all_of_them;
    if (likely < g.least || int64_t(tree.nodes.size()) == g.most) continue;
    int64_t token = g.tokens ? g.tokens[ids[k]] : ids[k];
    tree.nodes.push_back({token, node, parent.depth + 1, likely, -1});
  }
}

}  // namespace
