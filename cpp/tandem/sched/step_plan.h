#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tandem/base/check.h"
#include "tandem/kv/page_pool.h"
#include "tandem/sched/sequence.h"
#include "tandem/sched/types.h"

namespace tandem::sched {

class Scheduler;

// One step as the engine is to run it. All arrays are contiguous, lie in one block that keeps its address for the life
// of the scheduler, and do not change from `plan` until the step's own `complete` or `fail`; after that the block is
// used for a later step. There are max_steps_in_flight + 1 blocks, used in turn.
//
// Per row r (R rows, at most one per sequence):
//   seq_id       the request
//   epoch        goes up whenever the sequence loses its seat; a result counts only for the epoch it was planned in
//   seat         index of the sequence in the device vectors. Not given to another sequence before the last step naming
//                it has completed
//   kind         RowKind
//   first_index  planned length of the sequence at the start of the step: token t of the row has index first_index + t.
//                Exact for a context row. For a decode row an upper bound while an earlier step is in flight: the true
//                length is on the device, never larger, and counts
//   query_len    tokens of the row: of a context row its chunk, of a decode row 1 + num_drafts
//   write_from   entries of index i, in any layer, are written iff i >= write_from; those below are shared or committed
//   num_drafts   drafts verified by a decode row, 0 for a context row
//   max_length   limit of the sequence in tokens: no index >= max_length is touched. first_index may equal it, in a row
//                that turns out to lie behind its sequence's end
//   samples      1: the row yields tokens and has a place in StepResult: decode rows and the last chunk of a prompt
//   proposes     1: the row is to propose drafts, which its next row verifies. 0 in all rows where too many run for
//                drafting to pay, and in rows of requests that do not speculate: their next num_drafts is then 0. The
//                drafter's single steps may leave such rows out; its extend pass may not
//   fresh        1: first row on this seat. Its device state is to be initialised: length = first_index, and what
//                sampling needs is rebuilt from the known tokens
//
// A context row's token ids are token_ids[token_offsets[r] .. token_offsets[r+1]): the query_len tokens of the row and
// the one after them, which the drafter's entry at first_index + query_len consumes; that one is -1 on the last chunk,
// being the one sampled in the step. Decode rows have none: theirs are on the device.
//
// `table_changes` lists (seat, page index, slot), to be applied to the block table before the step. A seat's entries
// that its rows do not list stay as they were.
class StepPlan {
 public:
  struct Limits {
    std::int32_t max_rows = 0;
    std::int32_t max_token_ids = 0;
    std::int32_t max_table_changes = 0;
  };
  struct TableChange {
    std::int32_t seat;
    std::int32_t page_index;
    std::int32_t slot;
  };
  static_assert(sizeof(TableChange) == 3 * sizeof(std::int32_t), "shown to Python as int32 [N, 3]");

  explicit StepPlan(const Limits& limits);
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  [[nodiscard]] StepId step_id() const { return step_id_; }
  [[nodiscard]] std::int32_t num_rows() const { return num_rows_; }
  [[nodiscard]] std::int32_t num_sampling_rows() const { return num_sampling_rows_; }
  [[nodiscard]] std::int32_t num_tokens() const { return num_tokens_; }  // sum of query_len

  [[nodiscard]] std::span<const std::int64_t> seq_id() const { return rows(seq_id_); }
  [[nodiscard]] std::span<const std::int32_t> epoch() const { return rows(epoch_); }
  [[nodiscard]] std::span<const std::int32_t> seat() const { return rows(seat_); }
  [[nodiscard]] std::span<const std::int32_t> kind() const { return rows(kind_); }
  [[nodiscard]] std::span<const std::int32_t> first_index() const { return rows(first_index_); }
  [[nodiscard]] std::span<const std::int32_t> query_len() const { return rows(query_len_); }
  [[nodiscard]] std::span<const std::int32_t> write_from() const { return rows(write_from_); }
  [[nodiscard]] std::span<const std::int32_t> num_drafts() const { return rows(num_drafts_); }
  [[nodiscard]] std::span<const std::int32_t> max_length() const { return rows(max_length_); }
  [[nodiscard]] std::span<const std::uint8_t> samples() const { return rows(samples_); }
  [[nodiscard]] std::span<const std::uint8_t> proposes() const { return rows(proposes_); }
  [[nodiscard]] std::span<const std::uint8_t> fresh() const { return rows(fresh_); }
  [[nodiscard]] std::span<const std::int32_t> token_offsets() const {
    return {token_offsets_, static_cast<std::size_t>(num_rows_) + 1};
  }
  [[nodiscard]] std::span<const TokenId> token_ids() const {
    return {token_ids_, static_cast<std::size_t>(token_offsets_[num_rows_])};
  }
  [[nodiscard]] std::span<const TableChange> table_changes() const {
    return {table_changes_, static_cast<std::size_t>(num_table_changes_)};
  }

 private:
  friend class Scheduler;

  template <typename T>
  [[nodiscard]] std::span<const T> rows(const T* first) const {
    return {first, static_cast<std::size_t>(num_rows_)};
  }

  void begin(StepId step_id);
  // Appends a row of `sequence`, whose token ids, if any, were appended before.
  void add_row(Sequence& sequence, RowKind kind, std::int32_t first_index, std::int32_t query_len,
               std::int32_t write_from, std::int32_t num_drafts, bool samples) {
    TANDEM_CHECK(num_rows_ < limits_.max_rows, "a step has more rows than seats");
    const std::int32_t r = num_rows_++;
    seq_id_[r] = sequence.key.seq_id.value();
    epoch_[r] = sequence.epoch;
    seat_[r] = sequence.seat.value();
    kind_[r] = static_cast<std::int32_t>(kind);
    first_index_[r] = first_index;
    query_len_[r] = query_len;
    write_from_[r] = write_from;
    num_drafts_[r] = num_drafts;
    max_length_[r] = sequence.max_length;
    samples_[r] = samples ? 1 : 0;
    proposes_[r] = 0;
    fresh_[r] = sequence.fresh ? 1 : 0;
    token_offsets_[r + 1] = num_token_ids_;
    sequences_.push_back(&sequence);
    num_sampling_rows_ += samples ? 1 : 0;
    num_tokens_ += query_len;
  }
  void add_token_ids(std::span<const TokenId> ids, bool last_from_device);
  // Lists the pages of `sequence` that its seat's table does not have yet.
  void add_table_changes(Sequence& sequence) {
    if (sequence.pages.num_pages() != sequence.num_listed_pages) {
      list_new_pages(sequence);
    }
  }
  void list_new_pages(Sequence& sequence);
  [[nodiscard]] std::int32_t table_changes_left() const { return limits_.max_table_changes - num_table_changes_; }

  Limits limits_;
  StepId step_id_;
  std::int32_t num_rows_ = 0;
  std::int32_t num_sampling_rows_ = 0;
  std::int32_t num_tokens_ = 0;
  std::int32_t num_token_ids_ = 0;
  std::int32_t num_table_changes_ = 0;

  std::unique_ptr<std::byte[]> block_;
  std::int64_t* seq_id_ = nullptr;
  std::int32_t* epoch_ = nullptr;
  std::int32_t* seat_ = nullptr;
  std::int32_t* kind_ = nullptr;
  std::int32_t* first_index_ = nullptr;
  std::int32_t* query_len_ = nullptr;
  std::int32_t* write_from_ = nullptr;
  std::int32_t* num_drafts_ = nullptr;
  std::int32_t* max_length_ = nullptr;
  std::int32_t* token_offsets_ = nullptr;
  TokenId* token_ids_ = nullptr;
  TableChange* table_changes_ = nullptr;
  std::uint8_t* samples_ = nullptr;
  std::uint8_t* proposes_ = nullptr;
  std::uint8_t* fresh_ = nullptr;

  std::vector<Sequence*> sequences_;  // by row
  Remains remains_;                   // of sequences that ended or lost their seat while this step names them
};

}  // namespace tandem::sched
