// Draft trees of an EAGLE head, built level by level in one call: a level takes less than a
// millisecond, and Python would add as much again. The same trees as TreeBuilder's in
// drafters/tree_builder.py.
//
//   build_trees: read_inputs, then for each level: leaves_to_expand -> head_forward -> add_children

#pragma once

#include "forward.h"

namespace {

struct Node {
  int64_t token, parent, depth;
  float confidence;        // probability of the path from the root to this node
  int64_t expanded_index;  // index among the expanded nodes of the tree; -1: a leaf
};

// A tree. Expanded nodes are those with KV entries in the head's cache: they have children.
struct Tree {
  std::vector<Node> nodes;
  std::vector<int32_t> depths;      // of expanded nodes
  std::vector<uint64_t> ancestors;  // of expanded nodes, as bits of expanded indices
  std::vector<float> outputs;       // of expanded nodes, [hidden_size] each

  // The leaves of highest confidence above max_depth, at most `count`, in order of index.
  std::vector<int64_t> leaves_to_expand(int64_t max_depth, int64_t count) const {
    std::vector<int64_t> leaves;
    for (int64_t i = 1; i < int64_t(nodes.size()); i++)
      if (nodes[i].expanded_index < 0 && nodes[i].depth < max_depth) leaves.push_back(i);
    std::stable_sort(leaves.begin(), leaves.end(), [&](int64_t a, int64_t b) {
      return nodes[a].confidence > nodes[b].confidence;
    });
    if (int64_t(leaves.size()) > count) leaves.resize(count);
    std::sort(leaves.begin(), leaves.end());
    return leaves;
  }

  void expand(int64_t index) {
    Node& node = nodes[index];
    node.expanded_index = depths.size();
    uint64_t parent_bits = index ? ancestors[nodes[node.parent].expanded_index] : 0;
    depths.push_back(node.depth);
    ancestors.push_back(parent_bits | uint64_t(1) << node.expanded_index);
  }
};

// The head's input for a token and the hidden state before it (fc's feature, or the head's own
// output): what the first layer's attention reads, [2][hidden_size], and the residual.
void project_input(const Model& m, const TreeArgs& args, int64_t token, const float* hidden,
                   float* first_input, float* residual) {
  const int64_t size = m.hidden_size;
  float_row_of(args.embeddings.kind)(args.embeddings, token, first_input);
  rms_norm(first_input, args.embed_norm, m.norm_eps, size, first_input);
  rms_norm(hidden, args.hidden_norm, m.norm_eps, size, first_input + size);
  std::copy_n(args.norm_before_residual ? first_input + size : hidden, size, residual);
}

// Hidden states that a forward of the head reads and writes, with memory for `num_tokens` tokens.
struct HeadBuffers {
  std::vector<float> hidden, first_input, cos, sin, scratch;

  HeadBuffers(const Model& m, int64_t num_tokens, int64_t threads)
      : hidden(num_tokens * m.hidden_size),
        first_input(num_tokens * 2 * m.hidden_size),
        cos(num_tokens * m.head_dim),
        sin(num_tokens * m.head_dim),
        scratch(scratch_size(m, num_tokens, threads)) {}

  // The t-th token, at a position: its rotary embedding and its input.
  void set(const Model& m, const TreeArgs& args, int64_t t, int64_t position, int64_t token,
           const float* previous) {
    std::copy_n(args.cos + position * m.head_dim, m.head_dim, cos.data() + t * m.head_dim);
    std::copy_n(args.sin + position * m.head_dim, m.head_dim, sin.data() + t * m.head_dim);
    project_input(m, args, token, previous, first_input.data() + t * 2 * m.hidden_size,
                  hidden.data() + t * m.hidden_size);
  }

  ForwardArgs forward_args(int64_t num_sequences, int64_t num_nodes) {
    ForwardArgs f = {};
    f.num_sequences = num_sequences, f.num_nodes = num_nodes;
    f.cos = cos.data(), f.sin = sin.data(), f.first_input = first_input.data();
    f.hidden = hidden.data(), f.scratch = scratch.data();
    return f;
  }
};

// ---------------------------------------------------------------------------- inputs of the text

// The hidden states of all inputs side by side, normed: [num_sequences][max_inputs][num_hidden *
// target_hidden_size].
std::vector<float> joined_hidden(const Model& m, const TreeArgs& args) {
  const HeadInputs& in = *args.inputs;
  const int64_t size = in.target_hidden_size, joined_size = in.num_hidden * size;
  std::vector<float> joined(args.num_sequences * in.max_inputs * joined_size);
  for (int64_t s = 0; s < args.num_sequences; s++)
    for (int64_t i = 0; i < in.num_inputs[s]; i++) {
      const int64_t entry = args.root_entries[s] - in.num_inputs[s] + 1 + i;
      const float* from = in.hidden + (s * in.num_entries + entry) * in.entry_stride;
      float* to = joined.data() + (s * in.max_inputs + i) * joined_size;
      for (int64_t k = 0; k < in.num_hidden; k++) {
        float* part = to + k * size;
        std::copy_n(from + in.hidden_indices[k] * size, size, part);
        if (in.norm == NORM_EACH)
          rms_norm(part, in.norm_weights + k * size, m.norm_eps, size, part);
      }
      if (in.norm == NORM_ALL) rms_norm(to, in.norm_weights, m.norm_eps, joined_size, to);
    }
  return joined;
}

// One linear layer, by all threads. `integers`: memory for [num_tokens][integer_bytes(w)].
void linear_all_threads(const Weights& w, const float* x, int64_t num_tokens, float* y,
                        int64_t threads, uint8_t* integers) {
  parallel(threads, [&] {
    if (const int64_t bytes = integer_bytes(w)) {
      const Range mine = thread_range(num_tokens, 1);
      for (int64_t t = mine.begin; t < mine.end; t++)
        encode_token(w, x + t * w.in_features, integers + t * bytes);
      barrier();
    }
    linear(w, {x, integers}, num_tokens, y, Output::STORE);
  });
}

// fc over the joined hidden states: [num_sequences][max_inputs][hidden_size].
std::vector<float> features(const Model& m, const TreeArgs& args, int64_t threads) {
  const Weights& fc = args.inputs->fc;
  const int64_t num_tokens = args.num_sequences * args.inputs->max_inputs;
  std::vector<float> joined = joined_hidden(m, args), found(num_tokens * m.hidden_size);
  std::vector<uint8_t> integers(num_tokens * integer_bytes(fc));
  linear_all_threads(fc, joined.data(), num_tokens, found.data(), threads, integers.data());
  return found;
}

// Runs the head over its new inputs. Fills the outputs [num_sequences][hidden_size] and the logits
// [num_sequences][draft vocab] after each sequence's last input, which is the root.
void read_inputs(const Model& m, const TreeArgs& args, int64_t threads, std::vector<float>& outputs,
                 std::vector<float>& logits) {
  const HeadInputs& in = *args.inputs;
  const int64_t size = m.hidden_size, num_nodes = in.max_inputs;
  const int64_t num_tokens = args.num_sequences * num_nodes;
  const std::vector<float> projected = features(m, args, threads);
  HeadBuffers buffers(m, num_tokens, threads);
  std::vector<int32_t> depths(num_tokens);
  std::vector<uint64_t> ancestors(num_tokens);
  std::vector<int64_t> num_cached(args.num_sequences);
  for (int64_t s = 0; s < args.num_sequences; s++) {
    num_cached[s] = args.root_entries[s] - in.num_inputs[s] + 1;
    for (int64_t i = 0; i < num_nodes; i++) {  // those behind num_inputs[s] are padding
      const int64_t t = s * num_nodes + i;
      buffers.set(m, args, t, num_cached[s] + i, in.tokens[t], projected.data() + t * size);
      depths[t] = i;
      ancestors[t] = (uint64_t(2) << i) - 1;
    }
  }
  ForwardArgs f = buffers.forward_args(args.num_sequences, num_nodes);
  f.num_cached = num_cached.data(), f.tree_size = num_nodes;
  f.depths = depths.data(), f.ancestors = ancestors.data();
  forward(m, f, threads);
  for (int64_t s = 0; s < args.num_sequences; s++)
    std::copy_n(buffers.hidden.data() + (s * num_nodes + in.num_inputs[s] - 1) * size, size,
                outputs.data() + s * size);
  // Logits after the roots only: a forward without layers.
  Model head_only = m;
  head_only.num_layers = 0;
  f.num_nodes = f.tree_size = 1, f.hidden = outputs.data();
  f.logits = logits.data();
  forward(head_only, f, threads);
}

// ------------------------------------------------------------------------------ levels of a tree

// The num_children largest logits and their indices, largest first.
int64_t largest_logits(const TreeArgs& args, int64_t vocab_size, const float* logits, float* values,
                       int64_t* indices) {
  const int64_t count = args.num_children < MAX_CHILDREN ? args.num_children : MAX_CHILDREN;
  for (int64_t k = 0; k < count; k++) values[k] = -INFINITY, indices[k] = -1;
  for (int64_t i = 0; i < vocab_size; i++) {
    if (!(logits[i] > values[count - 1])) continue;
    int64_t k = count - 1;
    for (; k > 0 && logits[i] > values[k - 1]; k--)
      values[k] = values[k - 1], indices[k] = indices[k - 1];
    values[k] = logits[i], indices[k] = i;
  }
  return count;
}

// Adds a node's children: the tokens of highest probability, unless their path's confidence is
// below min_confidence. None where the logits are not finite.
void add_children(const TreeArgs& args, int64_t vocab_size, const float* logits, Tree& tree,
                  int64_t index) {
  float values[MAX_CHILDREN];
  int64_t indices[MAX_CHILDREN];
  const int64_t count = largest_logits(args, vocab_size, logits, values, indices);
  if (!std::isfinite(values[0])) return;
  f32x16 total = {};
  int64_t i = 0;
  for (; i + 16 <= vocab_size; i += 16) total += fast_exp(load(logits + i) - values[0]);
  float normalizer = sum_lanes(total);
  for (; i < vocab_size; i++) normalizer += std::exp(logits[i] - values[0]);
  if (!std::isfinite(normalizer)) return;
  const Node parent = tree.nodes[index];
  for (int64_t k = 0; k < count && indices[k] >= 0; k++) {
    float confidence = parent.confidence * std::exp(values[k] - values[0]) / normalizer;
    if (confidence < args.min_confidence || int64_t(tree.nodes.size()) == args.max_nodes) continue;
    int64_t token = args.draft_to_target ? args.draft_to_target[indices[k]] : indices[k];
    tree.nodes.push_back({token, index, parent.depth + 1, confidence, -1});
  }
}

typedef std::vector<std::vector<int64_t>> Frontier;  // [num_sequences] leaves to expand

// Expands the frontier's leaves and runs the head over them: their outputs go to their trees,
// logits [num_sequences][num_nodes][draft vocab] to `logits`.
void head_forward(const Model& m, const TreeArgs& args, int64_t threads, std::vector<Tree>& trees,
                  const Frontier& frontier, int64_t num_nodes, HeadBuffers& buffers,
                  std::vector<float>& logits) {
  const int64_t size = m.hidden_size, num_sequences = args.num_sequences;
  int64_t tree_size = 0;
  for (int64_t s = 0; s < num_sequences; s++) {
    for (int64_t leaf : frontier[s]) trees[s].expand(leaf);
    tree_size = std::max(tree_size, int64_t(trees[s].depths.size()) + 1);
  }
  std::vector<int32_t> depths(num_sequences * tree_size, 1);
  std::vector<uint64_t> ancestors(num_sequences * tree_size, 1);
  std::vector<int64_t> tree_nodes(num_sequences * num_nodes);
  for (int64_t s = 0; s < num_sequences; s++) {
    Tree& tree = trees[s];
    std::copy(tree.depths.begin(), tree.depths.end(), depths.begin() + s * tree_size);
    std::copy(tree.ancestors.begin(), tree.ancestors.end(), ancestors.begin() + s * tree_size);
    // A sequence with fewer leaves than others is padded with a child of the root, behind its
    // nodes.
    const int64_t padding = tree.depths.size();
    ancestors[s * tree_size + padding] = 1 | uint64_t(1) << padding;
    for (int64_t j = 0; j < num_nodes; j++) {
      const int64_t t = s * num_nodes + j, count = frontier[s].size();
      const Node node = j < count ? tree.nodes[frontier[s][j]] : Node{0, 0, 1, 0, padding};
      tree_nodes[t] = node.expanded_index;
      const int64_t parent = tree.nodes[node.parent].expanded_index;
      buffers.set(m, args, t, args.root_entries[s] + node.depth, node.token,
                  tree.outputs.data() + parent * size);
    }
  }
  ForwardArgs f = buffers.forward_args(num_sequences, num_nodes);
  f.num_cached = args.root_entries, f.tree_size = tree_size, f.tree_nodes = tree_nodes.data();
  f.depths = depths.data(), f.ancestors = ancestors.data();
  f.logits = logits.data();
  forward(m, f, threads);
  for (int64_t s = 0; s < num_sequences; s++)
    for (int64_t j = 0; j < int64_t(frontier[s].size()); j++) {
      float* output = buffers.hidden.data() + (s * num_nodes + j) * size;
      if (args.norm_output) rms_norm(output, m.final_norm, m.norm_eps, size, output);
      trees[s].outputs.insert(trees[s].outputs.end(), output, output + size);
    }
}

// Trees of a root and its children, from the head's outputs and logits after the roots.
std::vector<Tree> first_level(const Model& m, const TreeArgs& args, std::vector<float>& outputs,
                              const std::vector<float>& logits) {
  const int64_t size = m.hidden_size, vocab_size = m.lm_head.out_features;
  std::vector<Tree> trees(args.num_sequences);
  for (int64_t s = 0; s < args.num_sequences; s++) {
    Tree& tree = trees[s];
    tree.nodes.push_back({-1, -1, 0, 1.0f, -1});
    tree.expand(0);
    float* output = outputs.data() + s * size;
    if (args.norm_output) rms_norm(output, m.final_norm, m.norm_eps, size, output);
    tree.outputs.assign(output, output + size);
    if (args.max_depths[s] > 0)
      add_children(args, vocab_size, logits.data() + s * vocab_size, tree, 0);
  }
  return trees;
}

void write_trees(const TreeArgs& args, const std::vector<Tree>& trees) {
  for (int64_t s = 0; s < args.num_sequences; s++) {
    const std::vector<Node>& nodes = trees[s].nodes;
    args.num_nodes[s] = nodes.size();
    for (int64_t i = 0; i < args.num_nodes[s]; i++) {
      args.tokens[s * args.max_nodes + i] = nodes[i].token;
      args.parents[s * args.max_nodes + i] = nodes[i].parent;
      args.confidence[s * args.max_nodes + i] = nodes[i].confidence;
    }
  }
}

// Which size of a call would make build_trees read or write beside its memory, or null.
const char* invalid(const Model& m, const TreeArgs& args) {
  const HeadInputs& in = *args.inputs;
  const int64_t num_sequences = args.num_sequences;
  if (num_sequences < 0 || num_sequences > m.num_slots || num_sequences > in.num_slots)
    return "its sequences lie outside of the cache's slots";
  if (args.num_children < 1 || args.nodes_per_level < 0 || args.max_nodes < 1)
    return "its trees have no room for nodes";
  // The root, the nodes expanded below it, and one that pads levels.
  const int64_t levels = std::max(args.max_levels - 1, int64_t(0));
  const int64_t tree_size = 2 + levels * args.nodes_per_level;
  if (in.max_inputs < 1 || in.max_inputs > MAX_NODES || tree_size > MAX_NODES)
    return "its number of nodes does not fit the trees";
  if (!all_in(in.hidden_indices, in.num_hidden, 0, in.entry_stride / in.target_hidden_size))
    return "its hidden states lie outside of an entry";
  if (!all_in(in.num_inputs, num_sequences, 1, in.max_inputs + 1))
    return "its inputs lie outside of the tensor that holds them";
  if (!all_in(in.tokens, num_sequences * in.max_inputs, 0, args.embeddings.out_features))
    return "its tokens lie outside of the embeddings";
  for (int64_t s = 0; s < num_sequences; s++) {
    const int64_t root = args.root_entries[s], first = root - in.num_inputs[s] + 1;
    if (first < 0 || root >= in.num_entries || root + tree_size > m.num_entries ||
        first + in.max_inputs > m.num_entries)
      return "its nodes lie outside of the cache's entries";
  }
  return nullptr;
}

// `m`: the head, over its own KV cache.
void build_trees(const Model& m, TreeArgs& args, int64_t threads) {
  const int64_t vocab_size = m.lm_head.out_features, num_sequences = args.num_sequences;
  const int64_t begin = now_ns();
  std::vector<float> outputs(num_sequences * m.hidden_size);
  std::vector<float> root_logits(num_sequences * vocab_size);
  read_inputs(m, args, threads, outputs, root_logits);
  args.inputs_seconds = 1e-9 * double(now_ns() - begin);
  std::vector<Tree> trees = first_level(m, args, outputs, root_logits);
  const int64_t max_tokens = num_sequences * args.nodes_per_level;
  HeadBuffers buffers(m, max_tokens, threads);
  std::vector<float> logits(max_tokens * vocab_size);
  int64_t& levels = args.levels = 0;
  for (; levels + 1 < args.max_levels; levels++) {
    Frontier frontier;
    int64_t num_nodes = 0;
    float level_confidence = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
      frontier.push_back(trees[s].leaves_to_expand(args.max_depths[s], args.nodes_per_level));
      for (int64_t leaf : frontier[s]) level_confidence += trees[s].nodes[leaf].confidence;
      num_nodes = std::max(num_nodes, int64_t(frontier[s].size()));
    }
    if (!num_nodes || level_confidence <= args.min_level_confidence) break;
    head_forward(m, args, threads, trees, frontier, num_nodes, buffers, logits);
    for (int64_t s = 0; s < num_sequences; s++)
      for (int64_t j = 0; j < int64_t(frontier[s].size()); j++)
        add_children(args, vocab_size, logits.data() + (s * num_nodes + j) * vocab_size, trees[s],
                     frontier[s][j]);
  }
  write_trees(args, trees);
}

}  // namespace
