#include "tandem/cpu/thread_pool.h"

#include <algorithm>
#include <string>
#include <thread>

#include "tandem/base/check.h"

namespace tandem::cpu {

namespace {

constexpr std::uint64_t kOpen = std::uint64_t{1} << 63;
constexpr std::uint64_t kInside = 0xffff;
constexpr int kSpins = 2000;  // some tens of microseconds, the gap between the kernels of one step

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  // Never destroyed: a worker may still be asleep on it when static objects go.
  static ThreadPool* pool = new ThreadPool();
  return *pool;
}

ThreadPool::ThreadPool() : num_threads_(std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 256)) {}

void ThreadPool::set_num_threads(int count) {
  if (count < 1 || count > 256) {
    throw InvalidArgument("num_threads " + std::to_string(count) + ": allowed are 1 to 256");
  }
  const std::lock_guard lock(serial_);
  num_threads_.store(count, std::memory_order_relaxed);
}

void ThreadPool::run_items() {
  for (;;) {
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= count_) return;
    call_(context_, item);
  }
}

void ThreadPool::run_shared(std::int64_t count, Call call, const void* context) {
  const std::lock_guard lock(serial_);
  for (; num_workers_ < num_threads() - 1; ++num_workers_) {
    std::thread(&ThreadPool::work, this, num_workers_).detach();
  }
  next_.store(0, std::memory_order_relaxed);
  count_ = count;
  call_ = call;
  context_ = context;
  const std::uint64_t number = (gate_.load(std::memory_order_relaxed) & ~kOpen) >> 16;
  gate_.store(kOpen | ((number + 1) << 16 & ~kOpen), std::memory_order_release);
  bell_.fetch_add(1, std::memory_order_release);
  bell_.notify_all();
  run_items();
  // Nobody enters any more; those inside are in the middle of an item.
  gate_.fetch_and(~kOpen, std::memory_order_acquire);
  for (int spins = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::work(int index) {
  std::uint64_t done = 0;  // the last loop that this worker took part in
  for (;;) {
    const std::uint32_t rung = bell_.load(std::memory_order_acquire);
    std::uint64_t gate = gate_.load(std::memory_order_acquire);
    if ((gate & kOpen) != 0 && gate >> 16 != done && index < num_threads() - 1) {
      if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) continue;
      done = gate >> 16;
      run_items();
      gate_.fetch_sub(1, std::memory_order_release);
      continue;
    }
    int spins = 0;
    while (spins < kSpins && bell_.load(std::memory_order_relaxed) == rung) {
      relax();
      ++spins;
    }
    if (spins == kSpins) bell_.wait(rung, std::memory_order_acquire);
  }
}

}  // namespace tandem::cpu
