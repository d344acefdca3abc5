#include "tandem/cpu/thread_pool.h"

#include <chrono>
#include <thread>

#include "support.h"
#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

constexpr std::int64_t kMuchWork = std::int64_t{1} << 40;

TEST(ThreadPoolTest, RunsEveryItemOnceForAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool::shared().set_num_threads(threads);
    for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      ThreadPool::shared().run(count, kMuchWork, [&](std::int64_t item) { ++runs[static_cast<std::size_t>(item)]; });
      for (const auto& times : runs) ASSERT_EQ(times, 1);
    }
  }
  ThreadPool::shared().set_num_threads(2);
}

TEST(ThreadPoolTest, AWorkerTakesPart) {
  ThreadPool::shared().set_num_threads(2);
  // Two items that each wait for the other can only end on two threads.
  std::atomic<int> arrived{0};
  ThreadPool::shared().run(2, kMuchWork, [&](std::int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPoolTest, LittleWorkStaysOnTheCaller) {
  ThreadPool::shared().set_num_threads(2);
  const std::thread::id self = std::this_thread::get_id();
  ThreadPool::shared().run(100, 100, [&](std::int64_t) { ASSERT_EQ(std::this_thread::get_id(), self); });
}

TEST(ThreadPoolTest, LoopsOfSeveralCallersDoNotMix) {
  ThreadPool::shared().set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong] {
      for (int loop = 0; loop < 200; ++loop) {
        std::atomic<std::int64_t> sum{0};
        ThreadPool::shared().run(20, kMuchWork, [&](std::int64_t item) { sum += item; });
        if (sum != 190) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  ThreadPool::shared().set_num_threads(2);
}

TEST(ThreadPoolTest, WakesWorkersThatHaveGoneToSleep) {
  ThreadPool::shared().set_num_threads(2);
  for (int loop = 0; loop < 3; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int> arrived{0};
    ThreadPool::shared().run(2, kMuchWork, [&](std::int64_t) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
    EXPECT_EQ(arrived, 2);
  }
}

TEST(ThreadPoolTest, RefusesACountOutsideItsRange) {
  EXPECT_THAT([] { ThreadPool::shared().set_num_threads(0); },
              ::testing::ThrowsMessage<InvalidArgument>("num_threads 0: allowed are 1 to 256"));
  EXPECT_THROW(ThreadPool::shared().set_num_threads(257), InvalidArgument);
}

TEST(IsaTest, OneIsInUseAndAnUnknownOneIsRefused) {
  EXPECT_THAT(supported_isas(), ::testing::Contains(std::string(kernels().name)));
  EXPECT_EQ(supported_isas().front(), "portable");
  EXPECT_THAT([] { set_isa("mmx"); }, ::testing::ThrowsMessage<InvalidArgument>(::testing::HasSubstr("isa 'mmx'")));
  EXPECT_EQ(kernels().name, supported_isas().back());
}

}  // namespace
}  // namespace tandem::cpu::testing
