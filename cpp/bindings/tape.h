#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tandem::bindings {

// Kernel calls in the order in which they were made, to be made again in one call. Holds the tensors and weights that
// the calls read and write, so their addresses stay valid. Records on one thread at a time, with the interpreter's
// lock.
class Tape {
 public:
  // The tape that records on this thread, or null.
  static Tape* recording();

  // InvalidArgument if this thread records already or the tape is not empty.
  void begin();
  // `complete`: whether to keep what was recorded.
  void end(bool complete);

  void add(std::int64_t work, std::function<void()> call);
  void keep(nanobind::handle object) noexcept { kept_.push_back(nanobind::borrow(object)); }

  // InvalidArgument while a tape records on this thread: the calls would be missing on it.
  void replay() const;
  [[nodiscard]] std::size_t num_calls() const { return calls_.size(); }

 private:
  std::vector<std::function<void()>> calls_;
  std::vector<nanobind::object> kept_;
  std::int64_t work_ = 0;  // multiply-adds of all calls, at the time of recording
};

// `object`, kept alive by the tape that records, if any.
template <class T>
const T& held(const T& object) {
  if (Tape* tape = Tape::recording()) tape->keep(nanobind::find(object));
  return object;
}

}  // namespace tandem::bindings
