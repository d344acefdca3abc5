#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace tandem::cpu {

// Workers shared by all kernels. A loop's items are claimed one by one, by the caller too, so a worker that is slow to
// wake costs nothing: the caller waits only for items that a worker has begun. Idle workers spin briefly, then sleep.
class ThreadPool {
 public:
  // Lives until the process ends; its workers are detached.
  static ThreadPool& shared();

  // Work from which on a loop is shared: some 5 us, several times a fork and join.
  static constexpr std::int64_t kWorthSharing = 400'000;

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads that take part in a loop, the caller's included. InvalidArgument unless 1 <= count <= 256.
  void set_num_threads(int count);
  [[nodiscard]] int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // body(item) for each item in [0, count). Loops of several callers run one after the other. `work` is the number of
  // multiply-adds of the whole loop, or what costs as much: little work runs on the caller alone.
  template <class Body>
  void run(std::int64_t count, std::int64_t work, const Body& body) {
    if (count <= 1 || work < kWorthSharing || num_threads() == 1) {
      for (std::int64_t item = 0; item < count; ++item) body(item);
      return;
    }
    run_shared(
        count, [](const void* context, std::int64_t item) { (*static_cast<const Body*>(context))(item); }, &body);
  }

 private:
  using Call = void (*)(const void* context, std::int64_t item);

  ThreadPool();
  void run_shared(std::int64_t count, Call call, const void* context);
  void work(int index);
  void run_items();

  std::mutex serial_;  // one loop at a time
  std::atomic<int> num_threads_;
  int num_workers_ = 0;  // started so far; guarded by serial_

  // The loop in progress. `gate_`: bit 63 open, bits 62..16 the loop's number, bits 15..0 workers inside.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
  std::int64_t count_ = 0;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> bell_{0};  // rung once per loop
};

}  // namespace tandem::cpu
