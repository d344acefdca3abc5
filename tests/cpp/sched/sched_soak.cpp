// The event interleaver for as many seeds as asked: sched_soak [count] [first seed].
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "sched/interleaver.h"

int main(int argc, char** argv) {
  using namespace tandem::sched::testing;
  try {
    const std::uint64_t count = argc > 1 ? std::stoull(argv[1]) : 10000;
    const std::uint64_t first = argc > 2 ? std::stoull(argv[2]) : 1000000;
    std::cout << "sched_soak: " << count << " seeds from " << first << std::endl;
    const InterleaverTotals totals = run_interleavers(first, count, 300);
    std::cout << totals.num_events << " events, " << totals.num_requests << " requests, " << totals.num_preemptions
              << " preemptions, " << totals.num_dropped_rows << " late rows dropped, " << totals.num_cached_tokens
              << " prompt tokens cached, " << totals.num_accepted_tokens << " drafts accepted, "
              << totals.num_failed_steps << " steps failed\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
