#include "bindings.h"
#include "cpu_args.h"
#include "tandem/base/check.h"
#include "tandem/cpu/thread_pool.h"
#include "tape.h"

using namespace nb::literals;

namespace tandem::bindings {

namespace {
thread_local Tape* current = nullptr;
}  // namespace

Tape* Tape::recording() { return current; }

void Tape::begin() {
  if (current != nullptr) throw InvalidArgument("a tape records on this thread already");
  if (!calls_.empty()) throw InvalidArgument("the tape holds " + std::to_string(calls_.size()) + " calls already");
  current = this;
}

void Tape::end(bool complete) {
  current = nullptr;
  if (complete) return;
  calls_.clear();
  kept_.clear();
  work_ = 0;
}

void Tape::add(std::int64_t work, std::function<void()> call) {
  calls_.push_back(std::move(call));
  work_ += work;
}

void Tape::replay() const {
  if (current != nullptr) throw InvalidArgument("a tape records on this thread; a replay would be missing on it");
  const auto all = [&] {
    for (const std::function<void()>& call : calls_) call();
  };
  if (work_ < cpu::ThreadPool::kWorthSharing) {
    all();
    return;
  }
  const nb::gil_scoped_release unlocked;
  all();
}

}  // namespace tandem::bindings

namespace tandem::cpu {

void bind_tape(nb::module_& m) {
  using bindings::Tape;
  nb::class_<Tape>(m, "Tape",
                   "Kernel calls that are made again in one call, without the interpreter between them.\n\n"
                   "`with tape:` records the calls of this thread while it makes them. A replay reads and writes the "
                   "same memory, which the tape keeps alive; nothing but kernels is recorded.")
      .def(nb::init<>())
      .def(
          "__enter__",
          [](Tape& tape) -> Tape& {
            tape.begin();
            return tape;
          },
          nb::rv_policy::reference, "Raises InvalidArgument if this thread records already or the tape is not empty.")
      .def(
          "__exit__", [](Tape& tape, nb::handle type, nb::handle, nb::handle) { tape.end(type.is_none()); },
          "type"_a.none(), "value"_a.none(), "traceback"_a.none(),
          "Ends the recording; an exception leaves the tape empty.")
      .def("replay", &Tape::replay, "Makes the calls again. Raises what they raise.")
      .def_prop_ro("num_calls", &Tape::num_calls, "Kernel calls on the tape.");
}

}  // namespace tandem::cpu
