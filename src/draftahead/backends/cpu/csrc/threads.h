// Threads of our own: how the threads of a forward pass start, divide work and wait for each other.
//
// `parallel(threads, body)` runs `body` in this thread and in workers. The workers belong to a
// team; a caller borrows an idle team for one call, so several callers run at the same time, each
// with a team of its own. Which thread computes what never changes a result: each output is
// computed whole by one thread.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>

// Wheels run on any glibc that torch runs on. The compiler would take the newest versions of these
// functions, which are the same functions: glibc 2.32 and 2.34 moved them from one file to another.
#if defined(FOR_OLD_GLIBC) && defined(__x86_64__)
#define OLDEST(function) asm(".symver " #function "," #function "@GLIBC_2.2.5");
#elif defined(FOR_OLD_GLIBC) && defined(__aarch64__)
#define OLDEST(function) asm(".symver " #function "," #function "@GLIBC_2.17");
#else
#define OLDEST(function)
#endif
OLDEST(pthread_create)
OLDEST(pthread_join)
OLDEST(pthread_sigmask)

namespace {

// How long a thread that waits for others keeps its core before it sleeps. Shorter: sleeping and
// waking (5 to 50 us) comes to barriers that are about to open. Longer: a foreign process waits for
// the core, perhaps the very one whose time slice ours are waiting for.
constexpr int64_t BARRIER_SPIN_NS = 50'000;
// The least of it, where spinning was in vain. Less: barriers that open at once put threads to
// sleep.
constexpr int64_t SHORTEST_SPIN_NS = 4'000;
// The same for workers between two calls: the next one comes 1 ms later. A core that sleeps in
// between takes long to wake up (with 100 us steps with an EAGLE head took 10% longer); a worker
// that spins for longer takes a core from other programs.
constexpr int64_t IDLE_SPIN_NS = 2'000'000;

inline int64_t now_ns() {
  using std::chrono::steady_clock;
  const auto time = steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The cores that this process may use. With more threads than cores nothing spins: what a thread
// waits for may need its core.
inline int64_t num_cores() {
#ifdef __linux__
  cpu_set_t cores;
  if (!sched_getaffinity(0, sizeof cores, &cores)) return CPU_COUNT(&cores);
#endif
  return sysconf(_SC_NPROCESSORS_ONLN);
}

// A number that threads wait for to change: they spin, then sleep.
class Signal {
 public:
  uint64_t value() const { return value_.load(std::memory_order_acquire); }

  void set(uint64_t value) {
    // Both seq_cst: either this thread sees the sleeper, or the sleeper sees the value.
    value_.store(value, std::memory_order_seq_cst);
    if (!sleepers_.load(std::memory_order_seq_cst)) return;
    pthread_mutex_lock(&mutex_);  // a sleeper is between its last look and its sleep until then
    pthread_mutex_unlock(&mutex_);
    pthread_cond_broadcast(&changed_);
  }

  // Returns the value once it is not `old`. `spin_ns`: how long it spins. It is halved when that
  // was in vain, for the thread that is waited for has most likely lost its core; and doubled, up
  // to `longest`, when it was not.
  uint64_t wait(uint64_t old, int64_t& spin_ns, int64_t longest) {
    const int64_t end = spin_ns ? now_ns() + spin_ns : 0;
    while (spin_ns && now_ns() < end)
      for (int i = 0; i < 32; i++) {
        if (const uint64_t now = value(); now != old) {
          spin_ns = 2 * spin_ns < longest ? 2 * spin_ns : longest;
          return now;
        }
        pause_briefly();
      }
    if (spin_ns > SHORTEST_SPIN_NS) spin_ns /= 2;
    pthread_mutex_lock(&mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) pthread_cond_wait(&changed_, &mutex_);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    pthread_mutex_unlock(&mutex_);
    return value();
  }

 private:
  alignas(64) std::atomic<uint64_t> value_{0};
  std::atomic<int64_t> sleepers_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

// How long this thread spins at its next barrier.
thread_local int64_t current_spin_ns = BARRIER_SPIN_NS;

// A caller and its workers.
class Team {
 public:
  Team* next = nullptr;  // in the list of idle teams

  // Runs body in this thread and in `threads` - 1 workers, or in as many as can be had.
  void run(int64_t threads, void (*body)(const void*), const void* argument) {
    hire(threads - 1);
    count_ = threads - 1 < hired_ ? threads : hired_ + 1;
    spins_ = count_ <= cores_;
    body_ = body, argument_ = argument;
    if (count_ > 1) job_.set((++jobs_ << 16) | uint64_t(count_));
    loops_ = work(0);
  }

  // Takes the next of `limit` chunks of a thread's part of a loop; -1 if none is left. A chunk is
  // taken once: a loop's number in the counter says whose chunks it counts, and threads leave a
  // loop when all of its chunks are taken, so a larger number means that none is left.
  int64_t take_chunk(int64_t thread, uint64_t loop, int64_t limit) {
    std::atomic<uint64_t>& taken = taken_[thread].chunks;
    uint64_t seen = taken.load(std::memory_order_relaxed);
    while (seen >> CHUNK_BITS <= loop) {
      const bool first = seen >> CHUNK_BITS < loop;
      const int64_t next = first ? 0 : int64_t(seen & ((uint64_t(1) << CHUNK_BITS) - 1));
      if (next >= limit) return -1;
      const uint64_t wanted = loop << CHUNK_BITS | uint64_t(next + 1);
      if (taken.compare_exchange_weak(seen, wanted, std::memory_order_relaxed)) return next;
    }
    return -1;
  }

  void barrier() {
    // Read before this thread arrives: behind the last arrival the next call may change them.
    const int64_t count = count_;
    int64_t no_spin = 0, &spin_ns = spins_ ? current_spin_ns : no_spin;
    const uint64_t phase = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.set(phase + 1);
    } else {
      phase_.wait(phase, spin_ns, BARRIER_SPIN_NS);
    }
  }

  // Ends the workers of a team that is not running.
  void dismiss() {
    job_.set(LEAVE);
    for (int64_t i = 0; i < hired_; i++) pthread_join(workers_[i].thread, nullptr);
    hired_ = 0;
  }

  int64_t count() const { return count_; }

 private:
  struct Worker {
    pthread_t thread;
    Team* team;
    int64_t index;      // in the team; the caller's is 0
    uint64_t last_job;  // before it was hired
  };
  static constexpr int64_t MAX_WORKERS = 1023;  // a job's low 16 bits: the number of its threads
  static constexpr uint64_t LEAVE = ~uint64_t(0);

  void hire(int64_t wanted) {
    if (wanted > MAX_WORKERS) wanted = MAX_WORKERS;
    if (hired_ >= wanted) return;
    cores_ = num_cores();
    // Signals are for threads of the process that handle them; faults end it, whatever the thread.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP})
      sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    for (; hired_ < wanted; hired_++) {
      Worker& worker = workers_[hired_];
      worker = {{}, this, hired_ + 1, job_.value()};
      if (pthread_create(&worker.thread, nullptr, start, &worker)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  static void* start(void* worker) {
    const Worker& self = *static_cast<Worker*>(worker);
    self.team->serve(self.index, self.last_job);
    return nullptr;
  }

  void serve(int64_t index, uint64_t last_job) {
    for (int64_t spin_ns = IDLE_SPIN_NS;;) {
      last_job = job_.wait(last_job, spin_ns, IDLE_SPIN_NS);
      if (last_job == LEAVE) return;
      const int64_t count = last_job & 0xffff;
      if (index >= count) continue;
      const bool spins = spins_;
      work(index);
      // A short one if it was short at the barriers: other processes need the cores.
      spin_ns = current_spin_ns < BARRIER_SPIN_NS ? current_spin_ns : IDLE_SPIN_NS;
      if (!spins) spin_ns = 0;
    }
  }

  uint64_t work(int64_t index);  // returns the number of its last loop

  static constexpr int CHUNK_BITS = 20;
  struct alignas(64) Taken {
    std::atomic<uint64_t> chunks{0};  // the number of a loop and, in the low bits, of its chunks
  };
  Worker workers_[MAX_WORKERS];
  Taken taken_[MAX_WORKERS + 1];
  int64_t hired_ = 0, cores_ = 1;
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  int64_t count_ = 1;
  bool spins_ = false;
  uint64_t jobs_ = 0, loops_ = 0;  // so far
  Signal job_, phase_;
  alignas(64) std::atomic<int64_t> arrived_{0};
};

// What this thread is to the call that it works for.
struct Membership {
  Team* team;
  int64_t index;
  uint64_t loop;  // the number of the last `share` that it entered: the same in all threads
};
thread_local Membership current = {nullptr, 0, 0};

inline uint64_t Team::work(int64_t index) {
  const Membership before = current;
  current = {this, index, loops_};
  body_(argument_);
  const uint64_t loop = current.loop;
  barrier();
  current = before;
  return loop;
}

// The teams that no call uses. They are kept: to start a thread takes longer than a small call.
class IdleTeams {
 public:
  static IdleTeams& all() {
    static IdleTeams* teams = new IdleTeams;  // never destroyed: other threads may outlive it
    return *teams;
  }

  // Null if there is no memory for one, or when the process ends.
  Team* borrow() {
    pthread_mutex_lock(&mutex_);
    Team* team = first_;
    if (team) first_ = team->next;
    const bool closed = closed_;
    pthread_mutex_unlock(&mutex_);
    return team || closed ? team : new (std::nothrow) Team;
  }

  void give_back(Team* team) {
    pthread_mutex_lock(&mutex_);
    team->next = first_;
    first_ = team;
    pthread_mutex_unlock(&mutex_);
  }

  // When the process ends. Teams at work are left to themselves.
  void close() {
    pthread_mutex_lock(&mutex_);
    closed_ = true;
    while (Team* team = first_) {
      first_ = team->next;
      team->dismiss();
      delete team;
    }
    pthread_mutex_unlock(&mutex_);
  }

 private:
  IdleTeams() {
    pthread_atfork([] { pthread_mutex_lock(&all().mutex_); },
                   [] { pthread_mutex_unlock(&all().mutex_); },
                   [] {  // the child has the forking thread alone: teams have lost their workers
                     all().first_ = nullptr;
                     pthread_mutex_unlock(&all().mutex_);
                   });
  }

  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Team* first_ = nullptr;
  bool closed_ = false;
};

struct CloseTeams {
  ~CloseTeams() { IdleTeams::all().close(); }
} close_teams;

// Runs body() in `threads` threads, this one included, or in fewer if the system gives no more;
// returns when all have returned. No body calls it. Within it num_threads(), thread_index(),
// barrier() and thread_range() tell each thread its part.
template <class Body>
void parallel(int64_t threads, const Body& body) {
  Team* team = threads > 1 ? IdleTeams::all().borrow() : nullptr;
  if (!team) return body();
  team->run(threads, [](const void* it) { (*static_cast<const Body*>(it))(); }, &body);
  IdleTeams::all().give_back(team);
}

inline int64_t num_threads() { return current.team ? current.team->count() : 1; }
inline int64_t thread_index() { return current.index; }

// Waits until all threads of the call are here.
inline void barrier() {
  if (current.team) current.team->barrier();
}

struct Range {
  int64_t begin, end;
};

// This thread's part of `count` items, in whole multiples of `unit`.
inline Range thread_range(int64_t count, int64_t unit) {
  int64_t threads = num_threads(), units = (count + unit - 1) / unit;
  int64_t per_thread = (units + threads - 1) / threads * unit;
  int64_t begin = per_thread * thread_index();
  if (begin > count) return {count, count};
  return {begin, begin + per_thread < count ? begin + per_thread : count};
}

// Chunks that each thread's part of a loop is cut into. More: the last chunks end closer to each
// other. Fewer: less time is spent on taking them, and memory is read in longer runs.
constexpr int64_t CHUNKS = 4;

// Calls body(range) until `count` items are done, in whole multiples of `unit`, in all threads
// together. Each thread takes chunks of its own part first, so memory is read in order; one that is
// done takes chunks of others, so that a thread that has lost its core does not hold up the rest.
template <class Body>
void share(int64_t count, int64_t unit, const Body& body) {
  Team* team = current.team;
  if (!team) return count > 0 ? body(Range{0, count}) : void();
  const uint64_t loop = ++current.loop;
  const int64_t threads = team->count(), units = (count + unit - 1) / unit;
  const int64_t per_thread = (units + threads - 1) / threads;
  const int64_t per_chunk = (per_thread + CHUNKS - 1) / CHUNKS;
  for (int64_t i = 0; i < threads; i++) {
    const int64_t owner = (current.index + i) % threads, begin = owner * per_thread;
    const int64_t end = begin + per_thread < units ? begin + per_thread : units;
    const int64_t chunks = end > begin ? (end - begin + per_chunk - 1) / per_chunk : 0;
    for (int64_t chunk; (chunk = team->take_chunk(owner, loop, chunks)) >= 0;) {
      const int64_t from = begin + chunk * per_chunk;
      const int64_t to = from + per_chunk < end ? from + per_chunk : end;
      body(Range{from * unit, to * unit < count ? to * unit : count});
    }
  }
}

}  // namespace
