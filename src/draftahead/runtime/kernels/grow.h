// Trees of guesses that a head grows, level by level, without leaving for Python in between: a level
// takes less than a millisecond, and half of it would go there. The same tree as growth.py's.

#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

extern "C" {

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
  const float* root_outputs;   // [rows][hidden]
  const float* root_logits;    // [rows][draft vocabulary]
  int64_t most;                // nodes a row that the lists below have room for
  int64_t* sizes;              // [rows] nodes, the root included
  int64_t *said, *above;       // [rows][most]
  float* likely;               // [rows][most] to be reached and right
};

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
