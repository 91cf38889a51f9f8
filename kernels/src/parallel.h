// Loops over chunks of work on XLA's own threads.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace recjax {

// Threads worth using: the pool may have many more than there are cores.
inline int64_t Threads(const xla::ffi::ThreadPool& pool) {
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return std::clamp<int64_t>(pool.num_threads(), 1, cores);
}

// Calls run(chunk) for all chunks, in any order, and returns when all are done.
//
// The pool may be full of other devices' handlers, all in here, so a task that was scheduled may never start while this
// one waits. So the caller takes chunks itself, tasks only help, and at the end the caller waits only for chunks that a
// running task has already taken. A task that starts later finds no chunk left and touches nothing but `Work`, which it
// owns a share of.
inline void ParallelFor(xla::ffi::ThreadPool& pool, int64_t threads, int64_t chunks,
                        std::function<void(int64_t)> run) {
  if (chunks <= 1 || threads <= 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
    return;
  }
  struct Work {
    std::function<void(int64_t)> run;
    int64_t chunks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    // The system's own: waiting on a std::condition_variable needs a C++ library of GCC 12, see older_systems.cc.
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t finished = PTHREAD_COND_INITIALIZER;

    void Help() {
      for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;) {
        run(chunk);
        if (done.fetch_add(1) + 1 == chunks) {
          pthread_mutex_lock(&mutex);
          pthread_cond_signal(&finished);
          pthread_mutex_unlock(&mutex);
        }
      }
    }
  };
  auto work = std::make_shared<Work>();
  work->run = std::move(run);
  work->chunks = chunks;
  for (int64_t i = std::min(threads, chunks) - 1; i > 0; --i) pool.Schedule([work] { work->Help(); });
  work->Help();
  pthread_mutex_lock(&work->mutex);
  while (work->done.load() != work->chunks) pthread_cond_wait(&work->finished, &work->mutex);
  pthread_mutex_unlock(&work->mutex);
}

// Below this many multiplications or moved values a chunk is not worth another thread.
inline constexpr int64_t kGrain = 1 << 16;

inline int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Splits 0..n into chunks of some `grain`, but enough of them for the threads to even out.
inline void ParallelRange(xla::ffi::ThreadPool& pool, int64_t n, int64_t work_each,
                          const std::function<void(int64_t, int64_t)>& run) {
  const int64_t threads = Threads(pool);
  const int64_t least = Ceil(kGrain, std::max<int64_t>(work_each, 1));
  const int64_t size = std::max(least, Ceil(n, 8 * threads));
  ParallelFor(pool, threads, Ceil(n, size),
              [&](int64_t chunk) { run(chunk * size, std::min(n, (chunk + 1) * size)); });
}

}  // namespace recjax
