// Low-rank screening of the LM head (SVD-softmax): logits through a low-rank projection select
// about 200 tokens, whose exact logits are then computed. For drafting only: the other logits stay
// approximate.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"

namespace {

constexpr int64_t BLOCK_TOKENS = 32;     // adjacent logits of which the largest is compared
constexpr int64_t VOCAB_ROWS_AHEAD = 8;  // vocabulary rows that are prefetched while one is read

// Adds to each of 16 totals the products of 4 weights (uint8) and 4 activations (int8).
inline i32x16 dot64(i32x16 total, const uint8_t* weights, const int8_t* activations) {
#ifdef __AVX512VNNI__
  return (i32x16)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(weights),
                                     _mm512_loadu_si512(activations));
#else
  for (int lane = 0; lane < 16; lane++)
    for (int j = 0; j < 4; j++)
      total[lane] += int32_t(weights[4 * lane + j]) * activations[4 * lane + j];
  return total;
#endif
}

// Exact logit of a token; vocab_rows lie row by row, not in panels. `inputs`: of one node.
inline float exact_logit(const Weights& vocab_rows, const Int8Inputs& inputs, int64_t token) {
  const int64_t in = vocab_rows.in_features, groups = inputs.groups;
  const uint8_t* data = static_cast<const uint8_t*>(vocab_rows.data) + token * in;
  float logit = vocab_rows.bias ? vocab_rows.bias[token] : 0.0f;
  for (int64_t g = 0; g < groups; g++) {
    i32x16 total = {};
    const int64_t end = (g + 1) * vocab_rows.group_size;
    for (int64_t k = g * vocab_rows.group_size; k < end; k += CHUNK)
      total = dot64(total, data + k, inputs.integers(0) + k);
    int32_t sum = inputs.corrections(0)[g];
    for (int lane = 0; lane < 16; lane++) sum += total[lane];
    logit += float(sum) * vocab_rows.scales[token * groups + g] * inputs.scales(0)[g];
  }
  return logit;
}

// The largest screening logit of each block of BLOCK_TOKENS tokens; -infinity for one that is NaN,
// which has no place in an order.
std::vector<float> block_maxima(const float* logits, int64_t vocab_size) {
  std::vector<float> maxima((vocab_size + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
  for (int64_t i = 0; i < int64_t(maxima.size()); i++) {
    const int64_t begin = i * BLOCK_TOKENS, left = std::min(BLOCK_TOKENS, vocab_size - begin);
    if (left == BLOCK_TOKENS) {
      f32x16 a = load(logits + begin), b = load(logits + begin + 16);
      maxima[i] = max_lane(a > b ? a : b);
    } else {
      maxima[i] = *std::max_element(logits + begin, logits + begin + left);
    }
    if (maxima[i] != maxima[i]) maxima[i] = -INFINITY;
  }
  return maxima;
}

// Replaces the screening logits of candidate tokens by their exact logits. Candidates are the
// tokens whose screening logit is at least the min_blocks-th largest block maximum: so at least
// min_blocks tokens. `integers`: the inputs of one node.
void replace_candidates(const ScreenedHead& head, const uint8_t* integers, float* logits) {
  const Weights& vocab_rows = head.vocab_rows;
  const Int8Inputs inputs(vocab_rows, integers);
  const int64_t vocab_size = vocab_rows.out_features;
  const std::vector<float> maxima = block_maxima(logits, vocab_size);
  const int64_t blocks = maxima.size(), rank = std::min(head.min_blocks, blocks) - 1;
  std::vector<float> ranked(maxima);
  std::nth_element(ranked.begin(), ranked.begin() + rank, ranked.end(), std::greater<float>());
  const float threshold = ranked[rank];
  std::vector<int64_t> candidates;
  for (int64_t i = 0; i < blocks; i++) {
    if (!(maxima[i] >= threshold)) continue;
    const int64_t end = std::min(vocab_size, (i + 1) * BLOCK_TOKENS);
    for (int64_t token = i * BLOCK_TOKENS; token < end; token++)
      if (logits[token] >= threshold) candidates.push_back(token);
  }
  const uint8_t* data = static_cast<const uint8_t*>(vocab_rows.data);
  const int64_t in = vocab_rows.in_features, count = candidates.size();
  for (int64_t i = 0; i < count; i++) {
    if (i + VOCAB_ROWS_AHEAD < count)
      for (int64_t k = 0; k < in; k += 64)
        __builtin_prefetch(data + candidates[i + VOCAB_ROWS_AHEAD] * in + k, 0, 3);
    logits[candidates[i]] = exact_logit(vocab_rows, inputs, candidates[i]);
  }
}

}  // namespace
