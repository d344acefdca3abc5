#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tandem/sched/scheduler.h"

// A device that computes nothing and remembers everything: each cache entry holds a mark of the token prefix that it
// was computed from, and each step looks at every entry it may read. A page reused too early, a hit of the wrong prefix
// or an entry never written shows as a mark that does not fit.
namespace tandem::sched::testing {

// A broken rule, with what was expected. Thrown, so that the same checks serve tests and the soak binary.
class Violation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool condition, const std::string& what) {
  if (!condition) {
    throw Violation(what);
  }
}

using Mark = std::uint64_t;
inline constexpr Mark kPoison = ~Mark{0};

inline Mark mix(Mark a, Mark b) {
  Mark x = a * 0x9e3779b97f4a7c15ull + b + 0x7f4a7c15ull;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 32;
  return x;
}

// The text that a request has when it runs alone: its prompt, then tokens that are a function of all tokens before
// them. It goes on beyond any end, as the device does not know ends.
class Text {
 public:
  static constexpr TokenId kVocabulary = 61;

  Text(std::vector<TokenId> prompt, const std::string& salt) : tokens_(std::move(prompt)) {
    for (const char c : salt) {
      salt_ = mix(salt_, static_cast<Mark>(c));
    }
    for (const TokenId token : tokens_) {
      marks_.push_back(extend(marks_.empty() ? salt_ : marks_.back(), token));
    }
  }

  [[nodiscard]] static Mark extend(Mark prefix, TokenId token) { return mix(prefix, static_cast<Mark>(token) + 1); }
  [[nodiscard]] TokenId token(std::int64_t i) {
    reach(i);
    return tokens_[static_cast<std::size_t>(i)];
  }
  // Mark of tokens [0, i].
  [[nodiscard]] Mark mark(std::int64_t i) {
    reach(i);
    return i < 0 ? salt_ : marks_[static_cast<std::size_t>(i)];
  }

 private:
  void reach(std::int64_t i) {
    while (static_cast<std::int64_t>(tokens_.size()) <= i) {
      const auto next = static_cast<TokenId>(mix(marks_.back(), 17) % static_cast<Mark>(kVocabulary));
      tokens_.push_back(next);
      marks_.push_back(extend(marks_.back(), next));
    }
  }

  Mark salt_ = 1;
  std::vector<TokenId> tokens_;
  std::vector<Mark> marks_;
};

inline std::vector<TokenId> make_prompt(std::int32_t length, std::uint64_t seed = 0) {
  std::vector<TokenId> prompt;
  for (std::int32_t i = 0; i < length; ++i) {
    prompt.push_back(static_cast<TokenId>(mix(seed, static_cast<Mark>(i)) % Text::kVocabulary));
  }
  return prompt;
}

// What the device made of a step, before the host cuts it: per sampling row, the new tokens.
struct DeviceResult {
  StepId step_id;
  std::vector<std::int64_t> seq_id;
  std::vector<std::vector<TokenId>> tokens;  // accepted drafts, then the target's own next token
  std::set<std::int32_t> slots;              // named by the tables of the step's rows
  std::set<std::int32_t> seats;
};

class FakeEngine {
 public:
  FakeEngine(const SchedulerConfig& config, std::uint64_t seed)
      : config_(config),
        page_(config.tokens_per_page),
        target_(static_cast<std::size_t>(config.num_slots * page_), kPoison),
        draft_(target_.size(), kPoison),
        seats_(static_cast<std::size_t>(config.max_seats)),
        random_(seed) {}

  void add(SeqId seq_id, std::vector<TokenId> prompt, const std::string& salt) {
    texts_.emplace(seq_id.value(), Text(std::move(prompt), salt));
  }
  [[nodiscard]] Text& text(std::int64_t seq_id) { return texts_.at(seq_id); }
  // Drafts that are right at the start of each round; -1: any number, by chance.
  void set_num_right_drafts(std::int32_t count) { num_right_drafts_ = count; }

  DeviceResult run(const StepPlan& plan) {
    DeviceResult result;
    result.step_id = plan.step_id();
    check_shape(plan);
    apply_tables(plan);
    for (std::size_t row = 0; row < plan.seq_id().size(); ++row) {
      const std::int64_t seq_id = plan.seq_id()[row];
      const std::int32_t seat = plan.seat()[row];
      require(result.seats.insert(seat).second, "seat " + std::to_string(seat) + " has two rows in one step");
      const std::vector<std::int32_t>& table = state(seat).table;
      result.slots.insert(table.begin(), table.end());
      std::vector<TokenId> tokens = plan.kind()[row] == static_cast<std::int32_t>(RowKind::Context)
                                        ? run_context(plan, row, text(seq_id))
                                        : run_decode(plan, row, text(seq_id));
      if (plan.samples()[row] != 0) {
        result.seq_id.push_back(seq_id);
        result.tokens.push_back(std::move(tokens));
      }
    }
    return result;
  }

 private:
  struct Seat {
    std::int64_t seq_id = -1;
    std::int64_t length = 0;
    TokenId last_token = -1;
    std::vector<TokenId> drafts;
    std::vector<std::int32_t> table;
  };

  Seat& state(std::int32_t seat) { return seats_.at(static_cast<std::size_t>(seat)); }

  void check_shape(const StepPlan& plan) const {
    require(plan.num_rows() > 0, "a plan without rows");
    require(plan.num_rows() <= config_.max_seats, "more rows than seats");
    std::int32_t num_tokens = 0;
    std::int32_t num_samples = 0;
    for (std::size_t row = 0; row < plan.seq_id().size(); ++row) {
      num_tokens += plan.query_len()[row];
      num_samples += plan.samples()[row];
      const bool context = plan.kind()[row] == static_cast<std::int32_t>(RowKind::Context);
      const std::int32_t num_ids = plan.token_offsets()[row + 1] - plan.token_offsets()[row];
      require(plan.query_len()[row] >= 1, "a row without tokens");
      require(num_ids == (context ? plan.query_len()[row] + 1 : 0), "a row with a wrong number of token ids");
      require(context || plan.samples()[row] == 1, "a decode row that does not sample");
      require(context || plan.query_len()[row] == 1 + plan.num_drafts()[row],
              "a decode row's length is not 1 + drafts");
      require(!context || plan.num_drafts()[row] == 0, "a context row with drafts");
      require(plan.first_index()[row] <= plan.max_length()[row], "a row begins beyond its limit");
    }
    require(num_tokens == plan.num_tokens() && num_tokens <= config_.max_tokens_per_step, "the budget is exceeded");
    require(num_samples == plan.num_sampling_rows(), "the number of sampling rows is wrong");
  }

  void apply_tables(const StepPlan& plan) {
    std::map<std::int32_t, std::size_t> row_of;
    for (std::size_t row = 0; row < plan.seq_id().size(); ++row) {
      row_of[plan.seat()[row]] = row;
      if (plan.fresh()[row] != 0) {
        Seat& seat = state(plan.seat()[row]);
        seat = Seat{};
        seat.seq_id = plan.seq_id()[row];
        seat.length = plan.first_index()[row];
      }
      require(state(plan.seat()[row]).seq_id == plan.seq_id()[row], "a seat changed hands without a fresh row");
    }
    for (const StepPlan::TableChange& change : plan.table_changes()) {
      require(row_of.contains(change.seat), "a table change for a seat without a row");
      Seat& seat = state(change.seat);
      require(change.page_index == static_cast<std::int32_t>(seat.table.size()), "table changes are not in page order");
      require(change.slot >= 0 && change.slot < config_.num_slots, "a slot outside the pool");
      seat.table.push_back(change.slot);
      const std::size_t row = row_of[change.seat];
      const bool hit = plan.fresh()[row] != 0 && (change.page_index + 1) * page_ <= plan.write_from()[row];
      if (!hit) {
        for (std::int64_t i = 0; i < page_; ++i) {
          target_[static_cast<std::size_t>(change.slot * page_ + i)] = kPoison;
          draft_[static_cast<std::size_t>(change.slot * page_ + i)] = kPoison;
        }
      }
    }
  }

  // Place of an index's entry; the table must cover it.
  std::size_t place(const Seat& seat, std::int64_t index) const {
    const std::int64_t page = index / page_;
    require(index >= 0 && page < static_cast<std::int64_t>(seat.table.size()),
            "index " + std::to_string(index) + " of sequence " + std::to_string(seat.seq_id) + " has no page");
    return static_cast<std::size_t>(seat.table[static_cast<std::size_t>(page)] * page_ + index % page_);
  }

  struct Writer {
    std::int64_t from;
    std::int64_t below;
  };
  void write(std::vector<Mark>& entries, const Seat& seat, const Writer& writer, std::int64_t index, Mark mark) const {
    if (index >= writer.from && index < writer.below) {
      entries[place(seat, index)] = mark;
    }
  }
  void read(const std::vector<Mark>& entries, const char* name, const Seat& seat, std::int64_t first, std::int64_t end,
            Text& text) const {
    for (std::int64_t i = first; i < end; ++i) {
      require(entries[place(seat, i)] == text.mark(i), std::string(name) + " entry " + std::to_string(i) +
                                                           " of sequence " + std::to_string(seat.seq_id) +
                                                           " is not of its prefix");
    }
  }

  std::vector<TokenId> run_context(const StepPlan& plan, std::size_t row, Text& text) {
    Seat& seat = state(plan.seat()[row]);
    const std::int64_t first = plan.first_index()[row];
    const std::int64_t end = first + plan.query_len()[row];
    require(first == seat.length, "a context row does not begin where its sequence stands");
    const bool last = plan.samples()[row] != 0;
    const std::span<const TokenId> ids = plan.token_ids().subspan(static_cast<std::size_t>(plan.token_offsets()[row]),
                                                                  static_cast<std::size_t>(plan.query_len()[row]) + 1);
    for (std::int64_t i = first; i <= end; ++i) {
      const bool from_device = last && i == end;
      require(ids[static_cast<std::size_t>(i - first)] == (from_device ? -1 : text.token(i)), "a wrong token id");
    }
    const Writer writer{plan.write_from()[row], plan.max_length()[row]};
    for (std::int64_t i = first; i < end; ++i) {
      write(target_, seat, writer, i, text.mark(i));
    }
    read(target_, "target", seat, 0, end, text);
    seat.length = end;
    if (config_.has_drafter) {
      for (std::int64_t i = first + 1; i <= end; ++i) {
        write(draft_, seat, writer, i, text.mark(i));
      }
      read(draft_, "draft", seat, 1, std::min<std::int64_t>(end + 1, writer.below), text);
    }
    if (!last) {
      return {};
    }
    seat.last_token = text.token(end);
    propose(plan.proposes()[row] != 0, seat, writer, text);
    return {seat.last_token};
  }

  std::vector<TokenId> run_decode(const StepPlan& plan, std::size_t row, Text& text) {
    Seat& seat = state(plan.seat()[row]);
    const std::int64_t n = seat.length;
    const std::int64_t limit = plan.max_length()[row];
    const std::int32_t num_drafts = plan.num_drafts()[row];
    require(plan.fresh()[row] == 0, "a decode row on a seat without state");
    require(n <= plan.first_index()[row], "the planned length is below the true one: derive would clamp");
    require(plan.write_from()[row] <= n, "a decode row would not write its first entry");
    require(num_drafts == 0 || num_drafts == config_.draft_len, "a round drafts another length than draft_len");
    if (n >= limit) {
      return {text.token(n + 1)};  // behind its end: touches nothing, and its result is dropped
    }
    require(seat.last_token == text.token(n), "the device continues another text");
    const Writer writer{plan.write_from()[row], limit};
    Mark mark = text.mark(n);
    write(target_, seat, writer, n, mark);
    std::int32_t num_accepted = 0;
    for (std::int32_t i = 0; i < num_drafts; ++i) {
      const TokenId draft = seat.drafts.at(static_cast<std::size_t>(i));
      require(draft >= 0, "a draft that was never proposed is verified");
      mark = Text::extend(mark, draft);
      write(target_, seat, writer, n + 1 + i, mark);
      if (num_accepted == i && n + 1 + i < limit && draft == text.token(n + 1 + i)) {
        ++num_accepted;
      }
    }
    const std::int64_t length = n + num_accepted + 1;
    read(target_, "target", seat, 0, length, text);
    if (config_.has_drafter) {
      for (std::int64_t i = n + 1; i <= n + 1 + config_.draft_len; ++i) {
        write(draft_, seat, writer, i, i <= length ? text.mark(i) : kPoison);
      }
      read(draft_, "draft", seat, 1, std::min(length + 1, limit), text);
    }
    std::vector<TokenId> tokens;
    for (std::int64_t i = n + 1; i <= length; ++i) {
      tokens.push_back(text.token(i));
    }
    seat.length = length;
    seat.last_token = tokens.back();
    propose(plan.proposes()[row] != 0, seat, writer, text);
    return tokens;
  }

  // The drafter's single steps: draft i + 1 is at index length + 1 + i, and all but the last are consumed and written.
  void propose(bool proposes, Seat& seat, const Writer& writer, Text& text) {
    const std::int32_t num_drafts = config_.draft_len;
    seat.drafts.assign(static_cast<std::size_t>(num_drafts), -1);
    if (!proposes) {
      return;
    }
    const std::int32_t num_right = num_right_drafts_ >= 0
                                       ? num_right_drafts_
                                       : std::uniform_int_distribution<std::int32_t>(0, num_drafts)(random_);
    Mark mark = text.mark(seat.length);
    for (std::int32_t i = 0; i < num_drafts; ++i) {
      const TokenId right = text.token(seat.length + 1 + i);
      const TokenId draft = i < num_right ? right : (right + 1) % Text::kVocabulary;
      seat.drafts[static_cast<std::size_t>(i)] = draft;
      mark = Text::extend(mark, draft);
      if (i + 1 < num_drafts) {
        write(draft_, seat, writer, seat.length + 1 + i, mark);
      }
    }
  }

  SchedulerConfig config_;
  std::int64_t page_;
  std::vector<Mark> target_;  // [num_slots, tokens_per_page]
  std::vector<Mark> draft_;
  std::vector<Seat> seats_;
  std::map<std::int64_t, Text> texts_;
  std::mt19937_64 random_;
  std::int32_t num_right_drafts_ = -1;
};

}  // namespace tandem::sched::testing
