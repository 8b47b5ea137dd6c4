// How the OpenMP threads of a forward pass divide work and wait for each other.

#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace {

// A barrier that spins briefly and then yields. OpenMP's spins for milliseconds, which on a busy
// machine takes the core from the thread that it waits for.
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
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
      if (spins > SPINS) sched_yield();
  }

 private:
  // About 10 us. More keeps another process's thread waiting; fewer give up the core too early.
  static constexpr int SPINS = 4000;
  const int threads_;
  std::atomic<int> arrived_{0}, phase_{0};
};

struct Range {
  int64_t begin, end;
};

// This thread's part of `count` items, in whole multiples of `unit`.
inline Range thread_range(int64_t count, int64_t unit) {
  int64_t threads = omp_get_num_threads(), units = (count + unit - 1) / unit;
  int64_t per_thread = (units + threads - 1) / threads * unit;
  int64_t begin = per_thread * omp_get_thread_num();
  if (begin > count) return {count, count};
  return {begin, begin + per_thread < count ? begin + per_thread : count};
}

}  // namespace
