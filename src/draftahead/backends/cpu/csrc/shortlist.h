// Logits over a large vocabulary from a fraction of its bytes, for a head that only guesses.
//
// A row of the vocabulary is looked at through a few directions first: those in which the head's
// outputs differ. That tells all logits roughly. Those that look best are then computed as they are.

#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace {

constexpr int64_t STRETCH = 32;  // logits side by side, of which the largest is looked at

// Adds 64 products of bytes, four to each of 16 whole numbers.
inline i16 dot64(i16 total, const uint8_t* w, const int8_t* x) {
#ifdef __AVX512VNNI__
  return (i16)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(w), _mm512_loadu_si512(x));
#else
  for (int lane = 0; lane < 16; lane++)
    for (int j = 0; j < 4; j++) total[lane] += int32_t(w[4 * lane + j]) * x[4 * lane + j];
  return total;
#endif
}

// One logit, by a row of weights that lie one after the other.
inline float logit(const Weights& w, const Rows& rows, int64_t row, int64_t token) {
  const int64_t groups = w.in / w.group;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + token * w.in;
  const int8_t* x = rows.q + row * w.in;
  float found = w.bias ? w.bias[token] : 0.0f;
  for (int64_t g = 0; g < groups; g++) {
    i16 total = {};
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += CHUNK)
      total = dot64(total, data + k, x + k);
    int32_t whole = rows.start[row * groups + g];
    for (int lane = 0; lane < 16; lane++) whole += total[lane];
    found += float(whole) * w.scales[token * groups + g] * rows.scales[row * groups + g];
  }
  return found;
}

// Rough logits in, and in place of the best of them what they are. The best: at least all that are
// above the largest of all but `least` stretches.
void sharpen(const Shortlist& s, const Rows& rows, int64_t row, float* logits) {
  const int64_t width = s.rows.out, count = (width + STRETCH - 1) / STRETCH;
  std::vector<float> peaks(count);
  for (int64_t i = 0; i < count; i++) {
    const int64_t from = i * STRETCH, left = std::min(STRETCH, width - from);
    if (left == STRETCH) {
      f16 a = load(logits + from), b = load(logits + from + 16);
      peaks[i] = biggest(a > b ? a : b);
    } else {
      peaks[i] = *std::max_element(logits + from, logits + from + left);
    }
  }
  std::vector<float> ranked(peaks);
  const int64_t place = std::min(s.least, count) - 1;
  std::nth_element(ranked.begin(), ranked.begin() + place, ranked.end(), std::greater<float>());
  const float bound = ranked[place];
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; i++) {
    if (!(peaks[i] >= bound)) continue;
    for (int64_t t = i * STRETCH; t < std::min(width, (i + 1) * STRETCH); t++)
      if (logits[t] >= bound) found.push_back(t);
  }
  const uint8_t* data = static_cast<const uint8_t*>(s.rows.data);
  const int64_t ahead = 8;
  for (int64_t i = 0; i < int64_t(found.size()); i++) {
    if (i + ahead < int64_t(found.size()))
      for (int64_t k = 0; k < s.rows.in; k += 64)
        __builtin_prefetch(data + found[i + ahead] * s.rows.in + k, 0, 3);
    logits[found[i]] = logit(s.rows, rows, row, found[i]);
  }
}

}  // namespace
