// The structs that Python fills (abi.py mirrors them with ctypes), and a description of their
// layout.
//
// Each struct is one list of fields. The list declares the struct and describes its layout, so the
// two cannot differ; Python compares the description with its mirrors when it loads the library.
//
// Shapes: num_sequences sequences, in adjacent slots of the KV cache, of num_nodes nodes each;
// num_tokens = num_sequences * num_nodes. A "KV entry" is the place of one token in a slot.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" {

// Raised when a function's arguments change: the layout below does not tell that.
constexpr int64_t ABI_VERSION = 5;

constexpr int64_t PANEL = 48;         // int8: outputs stored side by side; the last panel is padded
constexpr int64_t CHUNK = 64;         // int8: weights that one AVX-512 VNNI instruction multiplies
constexpr int64_t TOPK = 4;           // tokens of largest logits that a forward returns per node
constexpr int64_t MAX_CHILDREN = 16;  // of a node in a draft tree
constexpr int64_t MAX_NODES = 64;     // of a tree: ancestors are the bits of one word
constexpr int64_t KV_BLOCK = 32;      // int8 keys and values: numbers that share a scale

enum Activation { SILU = 0, GELU_TANH = 1 };
// How weights are stored. From F16 on: rows as in a GGUF or safetensors file. INT8: our own.
enum WeightKind { F32, INT8, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
// How inputs of a linear layer are multiplied with weights that have panels: see panels.h.
enum Arithmetic { FLOAT32_INPUTS, INT24_INPUTS, INT8_INPUTS };
enum KVFormat { KV_FLOAT32 = 0, KV_BFLOAT16 = 1, KV_INT8 = 2 };  // see kv_rows.h
enum InputNorm { NO_NORM = 0, NORM_EACH = 1, NORM_ALL = 2 };     // see HeadInputs.norm

#define DECLARE_FIELD(type, name) type name;

// One linear layer.
#define WEIGHTS_FIELDS(FIELD)                                                               \
  FIELD(const void*, data)    /* rows [out][in] of a kind; INT8: uint8 [panels][in / 4]     \
                                 [PANEL][4], the int8 value plus 128; null if only `panels` \
                                 are read */                                                \
  FIELD(const void*, panels)  /* the same weights for integer arithmetic, or null */        \
  FIELD(const float*, scales) /* INT8: [panels][in / group_size][PANEL] */                  \
  FIELD(const float*, bias)   /* [out], or null */                                          \
  FIELD(int64_t, out_features)                                                              \
  FIELD(int64_t, in_features)                                                               \
  FIELD(int64_t, group_size) /* INT8: weights that share a scale, a multiple of CHUNK */    \
  FIELD(int64_t, kind)       /* enum WeightKind */                                          \
  FIELD(int64_t, arithmetic) /* enum Arithmetic */
struct Weights {
  WEIGHTS_FIELDS(DECLARE_FIELD)
};

#define DECODER_LAYER_FIELDS(FIELD)                                                          \
  FIELD(Weights, q)                                                                          \
  FIELD(Weights, k)                                                                          \
  FIELD(Weights, v)                                                                          \
  FIELD(Weights, o)                                                                          \
  FIELD(Weights, gate)                                                                       \
  FIELD(Weights, up)                                                                         \
  FIELD(Weights, down)                                                                       \
  FIELD(const float*, input_norm)          /* [hidden_size] */                               \
  FIELD(const float*, post_attention_norm) /* [hidden_size] */                               \
  FIELD(const float*, q_norm)              /* [head_dim], or null */                         \
  FIELD(const float*, k_norm)              /* [head_dim], or null */                         \
  FIELD(void*, keys)                       /* [num_slots][num_kv_heads][num_entries] rows */ \
  FIELD(void*, values)                     /* the same */                                    \
  FIELD(int64_t, sliding_window)           /* tokens; 0: none */                             \
  FIELD(float, scaling)                    /* of attention scores */
struct DecoderLayer {
  DECODER_LAYER_FIELDS(DECLARE_FIELD)
};

// An LM head with low-rank screening: see screening.h.
#define SCREENED_HEAD_FIELDS(FIELD)                                                                \
  FIELD(Weights, projection)     /* float32 [rank][hidden_size] */                                 \
  FIELD(Weights, screening_head) /* int8 [vocab][rank] */                                          \
  FIELD(Weights, vocab_rows)     /* int8 [vocab][hidden_size] and scales, row by row: no panels */ \
  FIELD(int64_t, min_blocks)     /* blocks of the vocabulary of which a logit becomes exact */
struct ScreenedHead {
  SCREENED_HEAD_FIELDS(DECLARE_FIELD)
};

#define MODEL_FIELDS(FIELD)                                                       \
  FIELD(const DecoderLayer*, layers)                                              \
  FIELD(int64_t, num_layers)                                                      \
  FIELD(int64_t, hidden_size)                                                     \
  FIELD(int64_t, num_heads)                                                       \
  FIELD(int64_t, num_kv_heads)                                                    \
  FIELD(int64_t, head_dim)                                                        \
  FIELD(int64_t, first_input_size) /* in_features of the first layer's q, k, v */ \
  FIELD(int64_t, intermediate_size)                                               \
  FIELD(int64_t, num_slots)   /* of the KV cache */                               \
  FIELD(int64_t, num_entries) /* KV entries of a cache slot */                    \
  FIELD(int64_t, kv_format)   /* enum KVFormat: of a row of the KV cache */       \
  FIELD(int64_t, activation)  /* enum Activation */                               \
  FIELD(const float*, final_norm)                                                 \
  FIELD(Weights, lm_head)                                                         \
  FIELD(const ScreenedHead*, screened_head) /* in place of lm_head, or null */    \
  FIELD(float, norm_eps)
struct Model {
  MODEL_FIELDS(DECLARE_FIELD)
};

// One forward pass over num_nodes new nodes of each of num_sequences sequences. They may be a part
// of the tree_size nodes behind the num_cached entries of each slot (tree_nodes says which).
#define FORWARD_ARGS_FIELDS(FIELD)                                                                 \
  FIELD(int64_t, num_sequences)                                                                    \
  FIELD(int64_t, num_nodes)                                                                        \
  FIELD(int64_t, first_slot)         /* of the cache */                                            \
  FIELD(int64_t, num_context_tokens) /* nodes of each sequence that are text; the rest: drafts */  \
  FIELD(const int64_t*, num_cached)  /* [num_sequences] entries before the nodes */                \
  FIELD(int64_t, tree_size)          /* nodes of a sequence that depths and ancestors tell of */   \
  FIELD(const int64_t*, tree_nodes)  /* [num_sequences][num_nodes] index in the tree; null: all */ \
  FIELD(const int32_t*, depths)      /* [num_sequences][tree_size] */                              \
  FIELD(const uint64_t*, ancestors) /* [num_sequences][tree_size] bit m: node m is an ancestor, or \
                                       the node itself */                                          \
  FIELD(const float*, cos)          /* [num_sequences][num_nodes][head_dim] */                     \
  FIELD(const float*, sin)                                                                         \
  FIELD(const float*, first_input)  /* [num_sequences][num_nodes][first_input_size]: what the      \
                                       first layer's attention reads; null: normed hidden */       \
  FIELD(int64_t, kv_only)           /* stop once the last layer's keys and values are stored */    \
  FIELD(float*, hidden)             /* [num_sequences][num_nodes][hidden_size]: embeddings in,     \
                                       the last layer's hidden states out */                       \
  FIELD(float*, logits)             /* [num_sequences][num_nodes][vocab], or null: no LM head */   \
  FIELD(int64_t, num_aux_layers)    /* layers whose hidden states are stored */                    \
  FIELD(const int64_t*, aux_layers) /* [num_aux_layers] ascending numbers of layers; after the     \
                                       last layer the state is normed */                           \
  FIELD(float*, aux_hidden)         /* [num_sequences][num_nodes][num_aux_layers][hidden_size] */  \
  FIELD(int64_t*, topk)             /* [num_sequences][num_nodes][TOPK] tokens, or null */         \
  FIELD(float*, scratch)            /* draftahead_scratch_size(...) floats */
struct ForwardArgs {
  FORWARD_ARGS_FIELDS(DECLARE_FIELD)
};

// (hidden, token) inputs that an EAGLE head has not read yet: the last ones of each sequence.
#define HEAD_INPUTS_FIELDS(FIELD)                                                                \
  FIELD(const float*, hidden) /* [num_slots][num_entries][entry_stride]: the target's            \
                                 auxiliary hidden states */                                      \
  FIELD(int64_t, num_slots)                                                                      \
  FIELD(int64_t, num_entries)                                                                    \
  FIELD(int64_t, entry_stride)                                                                   \
  FIELD(int64_t, num_hidden) /* hidden states of a token that fc combines */                     \
  FIELD(int64_t, target_hidden_size)                                                             \
  FIELD(const int64_t*, hidden_indices) /* [num_hidden] which of them */                         \
  FIELD(int64_t, norm)                  /* enum InputNorm: none; one norm for each hidden state; \
                                           one for all of them side by side */                   \
  FIELD(const float*, norm_weights)     /* [num_hidden][target_hidden_size] */                   \
  FIELD(Weights, fc)                                                                             \
  FIELD(int64_t, max_inputs)        /* of a sequence */                                          \
  FIELD(const int64_t*, num_inputs) /* [num_sequences]; the last input holds the root */         \
  FIELD(const int64_t*, tokens)     /* [num_sequences][max_inputs] */
struct HeadInputs {
  HEAD_INPUTS_FIELDS(DECLARE_FIELD)
};

// Draft trees of num_sequences sequences, built level by level: see tree_builder.h.
#define TREE_ARGS_FIELDS(FIELD)                                                                    \
  FIELD(int64_t, num_sequences)                                                                    \
  FIELD(int64_t, max_levels)                                                                       \
  FIELD(int64_t, nodes_per_level)     /* leaves of a tree that get children at each level */       \
  FIELD(int64_t, num_children)        /* of each of them */                                        \
  FIELD(float, min_confidence)        /* nodes below it are dropped */                             \
  FIELD(float, min_level_confidence)  /* building stops at leaves whose confidences sum to less */ \
  FIELD(const int64_t*, root_entries) /* [num_sequences] KV entry of the root in its cache */      \
  FIELD(const int64_t*, max_depths)   /* [num_sequences] */                                        \
  FIELD(const int64_t*, draft_to_target) /* [draft vocab] token ids; null: the same vocabulary */  \
  FIELD(Weights, embeddings)       /* rows of any kind but INT8: [num_embeddings][hidden_size] */  \
  FIELD(const float*, embed_norm)  /* [hidden_size] */                                             \
  FIELD(const float*, hidden_norm) /* [hidden_size] */                                             \
  FIELD(int64_t, norm_before_residual)                                                             \
  FIELD(int64_t, norm_output)                                                                      \
  FIELD(const float*, cos) /* [num_entries][head_dim] */                                           \
  FIELD(const float*, sin)                                                                         \
  FIELD(const HeadInputs*, inputs)                                                                 \
  FIELD(int64_t, max_nodes)     /* of a tree: what the outputs below have room for */              \
  FIELD(int64_t*, num_nodes)    /* out [num_sequences], the root included */                       \
  FIELD(int64_t*, tokens)       /* out [num_sequences][max_nodes] */                               \
  FIELD(int64_t*, parents)      /* out [num_sequences][max_nodes] */                               \
  FIELD(float*, confidence)     /* out [num_sequences][max_nodes]: of the path to a node */        \
  FIELD(int64_t, levels)        /* out: below the first */                                         \
  FIELD(double, inputs_seconds) /* out: time spent on the inputs, before the first level */
struct TreeArgs {
  TREE_ARGS_FIELDS(DECLARE_FIELD)
};

}  // extern "C"

namespace {

#define DESCRIBE_FIELD(type, name)                                                           \
  text += std::string(" ") + #name + ":" + std::to_string(offsetof(Described, name)) + ":" + \
          std::to_string(sizeof(type));
#define DESCRIBE_STRUCT(Struct, FIELDS)                      \
  {                                                          \
    using Described = Struct;                                \
    text += #Struct " " + std::to_string(sizeof(Described)); \
    FIELDS(DESCRIBE_FIELD)                                   \
    text += "\n";                                            \
  }
#define DESCRIBE_CONSTANT(name) text += #name " " + std::to_string(int64_t(name)) + "\n";

// A line per constant, "name value"; a line per struct, "name size field:offset:size ...".
__attribute__((cold)) std::string abi_description() {
  std::string text;
  DESCRIBE_CONSTANT(ABI_VERSION)
  DESCRIBE_CONSTANT(PANEL)
  DESCRIBE_CONSTANT(CHUNK)
  DESCRIBE_CONSTANT(TOPK)
  DESCRIBE_CONSTANT(MAX_CHILDREN)
  DESCRIBE_CONSTANT(MAX_NODES)
  DESCRIBE_CONSTANT(KV_BLOCK)
  DESCRIBE_CONSTANT(SILU)
  DESCRIBE_CONSTANT(GELU_TANH)
  DESCRIBE_CONSTANT(F32)
  DESCRIBE_CONSTANT(INT8)
  DESCRIBE_CONSTANT(F16)
  DESCRIBE_CONSTANT(BF16)
  DESCRIBE_CONSTANT(Q4_0)
  DESCRIBE_CONSTANT(Q4_1)
  DESCRIBE_CONSTANT(Q5_0)
  DESCRIBE_CONSTANT(Q5_1)
  DESCRIBE_CONSTANT(Q8_0)
  DESCRIBE_CONSTANT(Q4_K)
  DESCRIBE_CONSTANT(Q5_K)
  DESCRIBE_CONSTANT(Q6_K)
  DESCRIBE_CONSTANT(FLOAT32_INPUTS)
  DESCRIBE_CONSTANT(INT24_INPUTS)
  DESCRIBE_CONSTANT(INT8_INPUTS)
  DESCRIBE_CONSTANT(KV_FLOAT32)
  DESCRIBE_CONSTANT(KV_BFLOAT16)
  DESCRIBE_CONSTANT(KV_INT8)
  DESCRIBE_CONSTANT(NO_NORM)
  DESCRIBE_CONSTANT(NORM_EACH)
  DESCRIBE_CONSTANT(NORM_ALL)
  DESCRIBE_STRUCT(Weights, WEIGHTS_FIELDS)
  DESCRIBE_STRUCT(DecoderLayer, DECODER_LAYER_FIELDS)
  DESCRIBE_STRUCT(ScreenedHead, SCREENED_HEAD_FIELDS)
  DESCRIBE_STRUCT(Model, MODEL_FIELDS)
  DESCRIBE_STRUCT(ForwardArgs, FORWARD_ARGS_FIELDS)
  DESCRIBE_STRUCT(HeadInputs, HEAD_INPUTS_FIELDS)
  DESCRIBE_STRUCT(TreeArgs, TREE_ARGS_FIELDS)
  return text;
}

}  // namespace
