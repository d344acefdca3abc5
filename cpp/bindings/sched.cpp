#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "tandem/base/check.h"
#include "tandem/sched/scheduler.h"

// None of these calls releases the GIL: they take microseconds, and giving it up beside one busy Python thread costs
// milliseconds.

namespace {

using namespace tandem;
using namespace tandem::sched;

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T, typename... Shape>
using View = nb::ndarray<nb::numpy, const T, Shape...>;
template <typename T>
using View1 = View<T, nb::ndim<1>>;

template <typename T>
std::span<const T> span_of(const Input<T>& array) {
  return {array.data(), array.shape(0)};
}

// A read-only array over memory that `owner` keeps alive.
template <typename T>
View1<T> view_of(std::span<const T> data, nb::handle owner) {
  return View1<T>(data.data(), {data.size()}, owner);
}

// A plan as Python holds it. The block behind it serves a later step once this one completed, so each access asks.
struct PlanHandle {
  const Scheduler* scheduler;
  const StepPlan* plan;
  StepId step_id;

  [[nodiscard]] const StepPlan& get() const {
    if (!scheduler->is_in_flight(step_id)) {
      throw InvalidArgument("StepPlan: step " + std::to_string(step_id.value()) +
                            " has completed; a plan is valid until its own complete or fail");
    }
    return *plan;
  }
};

struct EventsHandle {
  const StepEvents* events;
  StepId step_id;

  [[nodiscard]] const StepEvents& get() const {
    if (events->step_id != step_id) {
      throw InvalidArgument("StepEvents: those of step " + std::to_string(step_id.value()) +
                            " are gone; events are valid until the next complete or fail");
    }
    return *events;
  }
};

// A result as Python builds it: its arrays, not copied.
struct ResultHandle {
  std::int64_t step_id;
  Input<std::int32_t> num_tokens;
  Input<std::int32_t> num_accepted;
  Input<TokenId> tokens;
  Input<std::int32_t> finish;

  [[nodiscard]] StepResult get() const {
    return {StepId{step_id}, span_of(num_tokens), span_of(num_accepted), span_of(tokens), span_of(finish)};
  }
};

template <typename T>
void bind_rows(nb::class_<PlanHandle>& cls, const char* name, std::span<const T> (StepPlan::*rows)() const,
               const char* doc) {
  cls.def_prop_ro(
      name,
      [rows](nb::handle_t<PlanHandle> self) {
        return view_of((nb::cast<const PlanHandle&>(self).get().*rows)(), self);
      },
      doc);
}

template <typename T>
void bind_column(nb::class_<EventsHandle>& cls, const char* name, std::vector<T> StepEvents::* column,
                 const char* doc) {
  cls.def_prop_ro(
      name,
      [column](nb::handle_t<EventsHandle> self) {
        return view_of(std::span<const T>(nb::cast<const EventsHandle&>(self).get().*column), self);
      },
      doc);
}

void bind_types(nb::module_& m) {
  nb::enum_<FinishReason>(m, "FinishReason", nb::is_arithmetic(),
                          "Why a request ended; its value is the code in arrays.")
      .value("NONE", FinishReason::None)
      .value("STOP", FinishReason::Stop)
      .value("LENGTH", FinishReason::Length)
      .value("ABORT", FinishReason::Abort)
      .value("ERROR", FinishReason::Error);
  nb::enum_<RowKind>(m, "RowKind", nb::is_arithmetic(), "What a row does; its value is the code in StepPlan.kind.")
      .value("CONTEXT", RowKind::Context)
      .value("DECODE", RowKind::Decode);

  const SchedulerConfig defaults;
  nb::class_<SchedulerConfig>(
      m, "SchedulerConfig",
      "Fixed for the life of a scheduler. Raises InvalidArgument naming a field that does not fit.")
      .def(
          "__init__",
          [](SchedulerConfig* self, std::int32_t num_slots, std::int32_t tokens_per_page, std::int32_t max_seats,
             std::int32_t max_tokens_per_step, std::int32_t max_model_len, std::int32_t draft_len, bool has_drafter,
             bool overlap, bool enable_prefix_cache, std::int32_t watermark_pages, std::int32_t max_speculating_rows) {
            const SchedulerConfig config{num_slots,           tokens_per_page, max_seats,           max_tokens_per_step,
                                         max_model_len,       draft_len,       has_drafter,         overlap,
                                         enable_prefix_cache, watermark_pages, max_speculating_rows};
            config.validate();
            new (self) SchedulerConfig(config);
          },
          nb::kw_only(), nb::arg("num_slots"), nb::arg("tokens_per_page"), nb::arg("max_seats"),
          nb::arg("max_tokens_per_step"), nb::arg("max_model_len"), nb::arg("draft_len") = defaults.draft_len,
          nb::arg("has_drafter") = defaults.has_drafter, nb::arg("overlap") = defaults.overlap,
          nb::arg("enable_prefix_cache") = defaults.enable_prefix_cache,
          nb::arg("watermark_pages") = defaults.watermark_pages,
          nb::arg("max_speculating_rows") = defaults.max_speculating_rows)
      .def_ro("num_slots", &SchedulerConfig::num_slots, "Pages of the pool.")
      .def_ro("tokens_per_page", &SchedulerConfig::tokens_per_page)
      .def_ro("max_seats", &SchedulerConfig::max_seats, "Sequences running at once; also the most rows of a step.")
      .def_ro("max_tokens_per_step", &SchedulerConfig::max_tokens_per_step, "Most tokens (sum of query_len) of a step.")
      .def_ro("max_model_len", &SchedulerConfig::max_model_len, "No sequence grows beyond this many tokens.")
      .def_ro("draft_len", &SchedulerConfig::draft_len, "Drafts proposed per round, 0 to 7.")
      .def_ro("has_drafter", &SchedulerConfig::has_drafter, "Whether the cache has draft layers, even at draft_len 0.")
      .def_ro("overlap", &SchedulerConfig::overlap, "Whether a step may be planned while one is in flight.")
      .def_ro("enable_prefix_cache", &SchedulerConfig::enable_prefix_cache)
      .def_ro("watermark_pages", &SchedulerConfig::watermark_pages,
              "Pages that admission leaves free while anything runs.")
      .def_ro("max_speculating_rows", &SchedulerConfig::max_speculating_rows,
              "With more decode rows ready than this, none verifies drafts in that step.")
      .def_prop_ro("max_steps_in_flight", &SchedulerConfig::max_steps_in_flight)
      .def_prop_ro("decode_reach", &SchedulerConfig::decode_reach,
                   "A decode row planned at n touches no index above n + decode_reach.")
      .def_prop_ro("look_ahead", &SchedulerConfig::look_ahead,
                   "Tokens beyond the known ones that admission makes room for.")
      .def_prop_ro("max_sequence_tokens", &SchedulerConfig::max_sequence_tokens,
                   "The longest sequence, prompt and generated tokens together, that submit accepts.");

  nb::class_<RequestSpec>(m, "RequestSpec", "One request. `prompt` is int32 [P], P >= 1, copied.")
      .def(
          "__init__",
          [](RequestSpec* self, const Input<TokenId>& prompt, std::int32_t max_tokens, std::int32_t priority,
             std::string salt, bool speculate, bool synchronous) {
            const std::span<const TokenId> ids = span_of(prompt);
            new (self)
                RequestSpec{{ids.begin(), ids.end()}, max_tokens, priority, std::move(salt), speculate, synchronous};
          },
          nb::arg("prompt").noconvert(), nb::kw_only(), nb::arg("max_tokens"), nb::arg("priority") = 0,
          nb::arg("salt") = "", nb::arg("speculate") = true, nb::arg("synchronous") = false)
      .def_ro("max_tokens", &RequestSpec::max_tokens, "Tokens to generate at most.")
      .def_ro("priority", &RequestSpec::priority, "Lower goes first; ties by arrival.")
      .def_ro("salt", &RequestSpec::salt, "Prefixes are shared only under equal salts.")
      .def_ro("speculate", &RequestSpec::speculate, "False: its drafts are not proposed.")
      .def_ro("synchronous", &RequestSpec::synchronous, "Never planned while it has a step in flight.");

  nb::class_<ResultHandle>(m, "StepResult",
                           "What a step produced, per sampling row in plan order; the arrays are not copied.\n\n"
                           "num_tokens, num_accepted, finish: int32 [S]; tokens: int32 [sum(num_tokens)], the rows' "
                           "tokens end to end.\nA row has num_accepted + 1 tokens, or num_accepted where an accepted "
                           "draft ends the request.")
      .def(nb::init<std::int64_t, Input<std::int32_t>, Input<std::int32_t>, Input<TokenId>, Input<std::int32_t>>(),
           nb::arg("step_id"), nb::arg("num_tokens").noconvert(), nb::arg("num_accepted").noconvert(),
           nb::arg("tokens").noconvert(), nb::arg("finish").noconvert())
      .def_ro("step_id", &ResultHandle::step_id);

  nb::class_<Terminal>(m, "Terminal", "The one and only terminal event of a request.")
      .def_prop_ro("seq_id", [](const Terminal& self) { return self.seq_id.value(); })
      .def_ro("reason", &Terminal::reason)
      .def_ro("num_prompt_tokens", &Terminal::num_prompt_tokens)
      .def_ro("num_cached_tokens", &Terminal::num_cached_tokens,
              "Prompt tokens found in the prefix cache at the first admission.")
      .def_ro("num_generated_tokens", &Terminal::num_generated_tokens)
      .def_ro("num_preemptions", &Terminal::num_preemptions)
      .def_ro("num_rounds", &Terminal::num_rounds)
      .def_ro("num_drafted_tokens", &Terminal::num_drafted_tokens)
      .def_ro("num_accepted_tokens", &Terminal::num_accepted_tokens)
      .def(
          "__eq__", [](const Terminal& self, const Terminal& other) { return self == other; }, nb::is_operator())
      .def("__repr__", [](const Terminal& self) {
        return "Terminal(seq_id=" + std::to_string(self.seq_id.value()) +
               ", reason=" + std::string(to_string(self.reason)) +
               ", num_generated_tokens=" + std::to_string(self.num_generated_tokens) + ")";
      });

  nb::class_<Rounds>(m, "Rounds",
                     "What became of drafts, cumulative. A round is a decode row that verified drafts and whose result "
                     "counted. Of a round that ends its request, all drafts count as drafted, and as accepted those up "
                     "to and including the token that ends it.")
      .def_prop_ro("num_rounds", &Rounds::num_rounds)
      .def_prop_ro("num_drafted", &Rounds::num_drafted, "By place in the round, the first draft at 0; 7 places.")
      .def_prop_ro("num_accepted", &Rounds::num_accepted, "By place in the round, likewise.");

  nb::class_<Stats>(m, "Stats", "Counters since the start, and what is now: running, waiting, in flight, pending.")
      .def_ro("num_running", &Stats::num_running)
      .def_ro("num_waiting", &Stats::num_waiting)
      .def_ro("num_steps_in_flight", &Stats::num_steps_in_flight)
      .def_ro("num_pending_pages", &Stats::num_pending_pages, "Held by steps in flight alone.")
      .def_ro("num_submitted", &Stats::num_submitted)
      .def_prop_ro(
          "num_finished",
          [](const Stats& self) {
            nb::dict by_reason;
            for (std::size_t i = 1; i < kNumFinishReasons; ++i) {
              by_reason[nb::cast(static_cast<FinishReason>(i))] = self.num_finished[i];
            }
            return by_reason;
          },
          nb::sig("def num_finished(self) -> dict[FinishReason, int]"), "Requests ended, by reason.")
      .def_ro("num_preemptions", &Stats::num_preemptions)
      .def_ro("num_planned_steps", &Stats::num_planned_steps)
      .def_ro("num_completed_steps", &Stats::num_completed_steps)
      .def_ro("num_failed_steps", &Stats::num_failed_steps)
      .def_ro("num_context_rows", &Stats::num_context_rows)
      .def_ro("num_decode_rows", &Stats::num_decode_rows)
      .def_ro("num_context_tokens", &Stats::num_context_tokens)
      .def_ro("num_decode_tokens", &Stats::num_decode_tokens, "Planned in decode rows, verified drafts included.")
      .def_ro("num_dropped_rows", &Stats::num_dropped_rows, "Completed for an epoch that had ended.")
      .def_ro("num_prompt_tokens", &Stats::num_prompt_tokens, "Of admitted requests, each counted once.")
      .def_ro("num_cached_tokens", &Stats::num_cached_tokens, "Of those, found in the prefix cache.")
      .def_ro("num_generated_tokens", &Stats::num_generated_tokens)
      .def_ro("cold_rounds", &Stats::cold_rounds, "Of sequences that began with nothing cached.")
      .def_ro("prefix_hit_rounds", &Stats::prefix_hit_rounds,
              "Of sequences that began with pages of the prefix tree, after a preemption their own ones included.")
      .def_prop_ro("num_rounds", &Stats::num_rounds, "On all routes, as the two below.")
      .def_prop_ro("num_drafted_tokens", &Stats::num_drafted_tokens)
      .def_prop_ro("num_accepted_tokens", &Stats::num_accepted_tokens);
}

void bind_plan(nb::module_& m) {
  nb::class_<PlanHandle> plan(m, "StepPlan",
                              "One step as the engine is to run it. The arrays are read-only, not copied, and do not "
                              "change until the step's own complete or fail; later access raises InvalidArgument.\n"
                              "R rows, at most one per sequence.");
  plan.def_prop_ro("step_id", [](const PlanHandle& self) { return self.step_id.value(); })
      .def_prop_ro("num_rows", [](const PlanHandle& self) { return self.get().num_rows(); })
      .def_prop_ro("num_sampling_rows", [](const PlanHandle& self) { return self.get().num_sampling_rows(); })
      .def_prop_ro("num_tokens", [](const PlanHandle& self) { return self.get().num_tokens(); }, "Sum of query_len.");
  bind_rows(plan, "seq_id", &StepPlan::seq_id, "int64 [R].");
  bind_rows(plan, "epoch", &StepPlan::epoch, "int32 [R]. Goes up whenever the sequence loses its seat.");
  bind_rows(plan, "seat", &StepPlan::seat, "int32 [R]. Index of the sequence in the device vectors.");
  bind_rows(plan, "kind", &StepPlan::kind, "int32 [R]. RowKind.");
  bind_rows(plan, "first_index", &StepPlan::first_index,
            "int32 [R]. Planned length at the start: exact for context rows; for decode rows an upper bound of the "
            "device's while an earlier step is in flight.");
  bind_rows(plan, "query_len", &StepPlan::query_len, "int32 [R]. Tokens of the row; 1 + num_drafts for decode rows.");
  bind_rows(plan, "write_from", &StepPlan::write_from,
            "int32 [R]. Entries of index i, in any layer, are written iff i >= write_from.");
  bind_rows(plan, "num_drafts", &StepPlan::num_drafts, "int32 [R]. Drafts verified by a decode row.");
  bind_rows(plan, "max_length", &StepPlan::max_length, "int32 [R]. No index >= max_length is touched.");
  bind_rows(plan, "samples", &StepPlan::samples, "uint8 [R]. 1: the row has a place in StepResult.");
  bind_rows(plan, "proposes", &StepPlan::proposes,
            "uint8 [R]. 1: the row is to propose drafts, which its next row verifies. The drafter's single steps may "
            "leave the others out, its extend pass may not.");
  bind_rows(plan, "fresh", &StepPlan::fresh,
            "uint8 [R]. 1: first row on this seat; its device state starts from first_index and the known tokens.");
  bind_rows(plan, "token_offsets", &StepPlan::token_offsets, "int32 [R+1]. Where each row's token_ids begin.");
  bind_rows(plan, "token_ids", &StepPlan::token_ids,
            "int32 [N]. query_len + 1 ids per context row, the last one -1 on the final chunk; none per decode row.");
  plan.def_prop_ro(
      "table_changes",
      [](nb::handle_t<PlanHandle> self) {
        const std::span<const StepPlan::TableChange> changes = nb::cast<const PlanHandle&>(self).get().table_changes();
        return View<std::int32_t, nb::shape<-1, 3>>(reinterpret_cast<const std::int32_t*>(changes.data()),
                                                    {changes.size(), 3}, self);
      },
      "int32 [N, 3]. (seat, page index, slot), to be applied to the block table before the step.");

  nb::class_<EventsHandle> events(m, "StepEvents",
                                  "What complete or fail made of a step; valid until the next one. Arrays have one "
                                  "element per sampling row in plan order (none after fail).");
  events.def_prop_ro("step_id", [](const EventsHandle& self) { return self.step_id.value(); })
      .def_prop_ro(
          "terminals", [](const EventsHandle& self) { return self.get().terminals; },
          "Requests that ended, each once in its life.");
  bind_column(events, "seq_id", &StepEvents::seq_id, "int64 [S].");
  bind_column(events, "valid", &StepEvents::valid, "uint8 [S]. 0: of a dropped epoch, ignored whole.");
  bind_column(events, "num_tokens", &StepEvents::num_tokens, "int32 [S]. Kept, cut at the length limit.");
  bind_column(events, "num_accepted", &StepEvents::num_accepted, "int32 [S]. Drafts among the kept tokens.");
  bind_column(events, "num_drafts", &StepEvents::num_drafts, "int32 [S]. Drafts that the row verified.");
  bind_column(events, "finish", &StepEvents::finish, "int32 [S]. FinishReason; NONE to go on.");
}

void bind_scheduler(nb::module_& m) {
  nb::class_<Scheduler>(m, "Scheduler",
                        "Decides what runs in each step: submit, then plan and complete in turn.\n\n"
                        "All calls come from one thread, the first that calls or the one that called bind_thread; "
                        "another one gets InvalidArgument, and so does any other mistake. A refused call changes "
                        "nothing.")
      .def(nb::init<const SchedulerConfig&>(), nb::arg("config"))
      .def(
          "submit", [](Scheduler& self, const RequestSpec& spec) { return self.submit(spec).value(); }, nb::arg("spec"),
          "Accepts a request and returns its id. Raises InvalidArgument for what could never run alone.")
      .def(
          "abort", [](Scheduler& self, std::int64_t seq_id) { return self.abort(SeqId{seq_id}); }, nb::arg("seq_id"),
          "Ends a request and returns its Terminal; None if it has ended already.")
      .def(
          "plan",
          [](Scheduler& self) -> std::optional<PlanHandle> {
            const StepPlan* const plan = self.plan();
            if (plan == nullptr) {
              return std::nullopt;
            }
            return PlanHandle{&self, plan, plan->step_id()};
          },
          nb::keep_alive<0, 1>(),
          "The next step; None if no row can run now: then complete a step in flight, or there is no work.")
      .def(
          "complete",
          [](Scheduler& self, const ResultHandle& result) {
            const StepEvents& events = self.complete(result.get());
            return EventsHandle{&events, events.step_id};
          },
          nb::arg("result"), nb::keep_alive<0, 1>(), "Takes the result of the oldest step in flight.")
      .def(
          "fail",
          [](Scheduler& self, std::int64_t step_id) {
            const StepEvents& events = self.fail(StepId{step_id});
            return EventsHandle{&events, events.step_id};
          },
          nb::arg("step_id"), nb::keep_alive<0, 1>(),
          "The oldest step in flight raised: its requests end with ERROR, the others go on.")
      .def(
          "known_tokens",
          [](const Scheduler& self, std::int64_t seq_id) {
            const std::span<const TokenId> tokens = self.known_tokens(SeqId{seq_id});
            auto copy = std::make_unique<TokenId[]>(tokens.size());
            std::ranges::copy(tokens, copy.get());
            nb::capsule owner(copy.get(), [](void* data) noexcept { delete[] static_cast<TokenId*>(data); });
            return nb::ndarray<nb::numpy, TokenId, nb::ndim<1>>(copy.release(), {tokens.size()}, owner);
          },
          nb::arg("seq_id"), "int32 [known], a copy: prompt, then generated tokens of an unfinished request.")
      .def(
          "num_cached", [](const Scheduler& self, std::int64_t seq_id) { return self.num_cached(SeqId{seq_id}); },
          nb::arg("seq_id"), "Prompt tokens found in the prefix cache at the first admission.")
      .def_prop_ro("num_unfinished", &Scheduler::num_unfinished, "Requests accepted and not ended.")
      .def_prop_ro("num_steps_in_flight", &Scheduler::num_steps_in_flight)
      .def_prop_ro("config", &Scheduler::config, nb::rv_policy::reference_internal)
      .def("stats", &Scheduler::stats)
      .def("ledger", &Scheduler::ledger, "State of every page, as kv.Ledger. O(num_slots).")
      .def("reset_prefix_cache", &Scheduler::reset_prefix_cache, "Forgets every cached prefix.")
      .def("bind_thread", &Scheduler::bind_thread, "Makes the calling thread the only one that may call from now on.")
      .def("check", &Scheduler::check, "Aborts the process unless the scheduler's books agree. For tests.");
}

}  // namespace

void bind_sched(nb::module_& m) {
  bind_types(m);
  bind_plan(m);
  bind_scheduler(m);
}
