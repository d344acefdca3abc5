#include "tandem/cpu/experts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tandem/base/check.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

namespace tandem::cpu {

namespace {

constexpr std::int64_t kHalfPanel = kPanelColumns / 2;

std::string shape(const PackedLinear& weight) {
  return std::string(name_of(weight.dtype())) + " [" + std::to_string(weight.out_features()) + ", " +
         std::to_string(weight.in_features()) + "]";
}

// One MLP's share of a call: its tokens, and where its rows lie among all (token, slot) pairs.
struct Group {
  Group(const PackedMlp& owner, std::int64_t pair, std::int64_t count, const KernelTable& table)
      : mlp(owner),
        first_pair(pair),
        inputs(count, owner.gate_up.padded_k(), table),
        hidden(count, owner.down.padded_k(), table),
        num_rows(count) {}

  const PackedMlp& mlp;
  std::int64_t first_pair;
  InputTiles inputs;
  InputTiles hidden;
  std::int64_t num_rows;
  std::int64_t input_offset = 0;   // floats into the packed inputs
  std::int64_t hidden_offset = 0;  // floats into the packed hidden rows
};

class Mixture {
 public:
  Mixture(const PackedExperts& experts, const ConstMatrix& x, const std::int32_t* ids, const float* weights,
          std::int64_t topk, const GatedActivation& activation, const Matrix& out)
      : experts_(experts),
        x_(x),
        ids_(ids),
        weights_(weights),
        topk_(topk),
        activation_(activation),
        out_(out),
        table_(kernels()) {}

  void run() {
    group_pairs();
    gather_inputs();
    activate();
    combine();
  }

 private:
  [[nodiscard]] std::int64_t slots() const { return topk_ + (experts_.has_shared() ? 1 : 0); }

  // Sorts the (token, slot) pairs by expert: `tokens_` lists the pairs' tokens, `pair_of_` finds a pair.
  void group_pairs() {
    const std::int64_t shared = experts_.num_routed();
    std::vector<std::int64_t> starts(static_cast<std::size_t>(shared) + 2, 0);
    const auto expert_of = [&](std::int64_t t, std::int64_t slot) {
      return slot < topk_ ? std::int64_t{ids_[t * topk_ + slot]} : shared;
    };
    for (std::int64_t t = 0; t < x_.rows; ++t) {
      for (std::int64_t slot = 0; slot < slots(); ++slot) {
        const std::int64_t expert = expert_of(t, slot);
        if (slot < topk_ && (expert < -1 || expert >= shared)) {
          throw InvalidArgument("expert " + std::to_string(expert) + " of token " + std::to_string(t) + ", slot " +
                                std::to_string(slot) + ": there are " + std::to_string(shared));
        }
        if (expert >= 0) ++starts[static_cast<std::size_t>(expert) + 1];
      }
    }
    for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
    num_pairs_ = starts.back();
    for (std::int64_t expert = 0; expert <= shared; ++expert) {
      const auto i = static_cast<std::size_t>(expert);
      if (starts[i + 1] > starts[i])
        groups_.emplace_back(experts_.mlp(expert), starts[i], starts[i + 1] - starts[i], table_);
    }
    tokens_.resize(static_cast<std::size_t>(num_pairs_));
    pair_of_.assign(static_cast<std::size_t>(x_.rows * slots()), -1);
    for (std::int64_t t = 0; t < x_.rows; ++t) {
      for (std::int64_t slot = 0; slot < slots(); ++slot) {
        const std::int64_t expert = expert_of(t, slot);
        if (expert < 0) continue;
        const std::int64_t pair = starts[static_cast<std::size_t>(expert)]++;
        tokens_[static_cast<std::size_t>(pair)] = t;
        pair_of_[static_cast<std::size_t>(t * slots() + slot)] = pair;
      }
    }
  }

  void gather_inputs() {
    std::int64_t input_floats = 0, hidden_floats = 0;
    // With one token every expert reads the same row, unless one of them was named twice.
    const bool same_row =
        x_.rows == 1 && std::ranges::all_of(groups_, [](const Group& group) { return group.num_rows == 1; });
    for (Group& group : groups_) {
      group.input_offset = same_row ? 0 : input_floats;
      input_floats = group.input_offset + group.inputs.num_floats();
      group.hidden_offset = hidden_floats;
      hidden_floats += group.hidden.num_floats();
      work_ += panel_work(group.mlp.gate_up, group.num_rows, group.mlp.gate_up.num_panels());
      for (std::int64_t tile = 0; tile < group.inputs.num_tiles(); ++tile) tiles_.push_back({&group, tile});
    }
    if (same_row && !tiles_.empty()) tiles_.resize(1);
    inputs_ = scratch_floats(Scratch::Inputs, input_floats);
    hidden_ = scratch_floats(Scratch::Hidden, hidden_floats);
    ThreadPool::shared().run(static_cast<std::int64_t>(tiles_.size()), num_pairs_ * x_.cols, [&](std::int64_t item) {
      const auto& [group, tile] = tiles_[static_cast<std::size_t>(item)];
      const void* rows[16];
      const int count = group->inputs.rows(tile);
      for (int r = 0; r < count; ++r) {
        rows[r] = x_.row(tokens_[static_cast<std::size_t>(group->first_pair + group->inputs.first_row(tile) + r)]);
      }
      table_.interleave_rows(x_.dtype, rows, count, x_.cols, group->mlp.gate_up.padded_k(),
                             inputs_ + group->input_offset + group->inputs.offset(tile));
    });
  }

  void activate() {
    struct Item {
      const Group* group;
      std::int64_t first, count;
    };
    std::vector<Item> items;
    for (const Group& group : groups_) {
      const PackedLinear& weight = group.mlp.gate_up;
      const PanelItems cut(weight.num_panels(), group.inputs.max_panels(),
                           panel_work(weight, group.num_rows, weight.num_panels()));
      for (std::int64_t i = 0; i < cut.num_items(); ++i) items.push_back({&group, cut.first(i), cut.count(i)});
    }
    const auto threads = static_cast<std::size_t>(ThreadPool::shared().num_threads());
    ThreadPool::shared().run(static_cast<std::int64_t>(items.size()), work_, [&](std::int64_t index) {
      const Item& item = items[static_cast<std::size_t>(index)];
      const Group& group = *item.group;
      const Item& next = items[std::min(static_cast<std::size_t>(index) + threads, items.size() - 1)];
      multiply(table_, group.mlp.gate_up, item.first, item.count, group.inputs, inputs_ + group.input_offset,
               next.group->mlp.gate_up.panel(next.first),
               [&](std::int64_t row, int rows, std::int64_t panel, std::int64_t panels, const float* products) {
                 store_hidden(group, row, rows, panel, panels, products);
               });
      // The padding of an odd width, so that the down weight's zero meets a number.
      const std::int64_t width = group.mlp.down.in_features();
      if (item.first == 0 && group.mlp.down.padded_k() != width) {
        for (std::int64_t tile = 0; tile < group.hidden.num_tiles(); ++tile) {
          float* pad = hidden_ + group.hidden_offset + group.hidden.offset(tile) + width * group.hidden.rows(tile);
          std::fill_n(pad, group.hidden.rows(tile), 0.0f);
        }
      }
    });
  }

  // Activates a piece of products, each panel 16 gates and 16 ups, and lays it out as the down projection's input.
  // Input and hidden tiles have the same rows: both are cut from num_rows alone.
  void store_hidden(const Group& group, std::int64_t row, int rows, std::int64_t panel, std::int64_t panels,
                    const float* products) {
    const std::int64_t width = group.mlp.down.in_features();
    float* tile = hidden_ + group.hidden_offset + row * group.mlp.down.padded_k();
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t p = 0; p < panels; ++p, products += kPanelColumns) {
        float active[kHalfPanel];
        if (activation_.kind == GatedActivation::Kind::SwigluOai) {
          table_.swiglu_oai_row(DType::F32, products, products + kHalfPanel, kHalfPanel, activation_.alpha,
                                activation_.limit, active);
        } else {
          table_.silu_mul_row(DType::F32, products, products + kHalfPanel, kHalfPanel, active);
        }
        const std::int64_t first = (panel + p) * kHalfPanel;
        const std::int64_t count = std::min(kHalfPanel, width - first);
        for (std::int64_t i = 0; i < count; ++i) tile[(first + i) * rows + r] = active[i];
      }
    }
  }

  void combine() {
    const std::int64_t num_panels = (out_.cols + kPanelColumns - 1) / kPanelColumns;
    int most = 1;
    for (const Group& group : groups_) most = std::max(most, group.hidden.max_panels());
    std::int64_t work = 0;
    for (const Group& group : groups_) work += panel_work(group.mlp.down, group.num_rows, num_panels);
    const PanelItems items(num_panels, most, work);
    ThreadPool::shared().run(items.num_items(), work, [&](std::int64_t item) {
      const std::int64_t first = items.first(item), count = items.count(item);
      const std::int64_t stride = count * kPanelColumns;
      float* products = scratch_floats(Scratch::Products, (num_pairs_ + 1) * stride);
      for (const Group& group : groups_) {
        const bool last = &group == &groups_.back();
        const PackedLinear& next = last ? groups_.front().mlp.down : (&group + 1)->mlp.down;
        multiply(table_, group.mlp.down, first, count, group.hidden, hidden_ + group.hidden_offset,
                 next.panel(last ? items.next(item) : first),
                 [&](std::int64_t row, int rows, std::int64_t panel, std::int64_t panels, const float* piece) {
                   const std::int64_t columns = panels * kPanelColumns;
                   for (int r = 0; r < rows; ++r) {
                     std::copy_n(piece + r * columns, columns,
                                 products + (group.first_pair + row + r) * stride + (panel - first) * kPanelColumns);
                   }
                 });
      }
      sum_slots(first, stride, products);
    });
  }

  void sum_slots(std::int64_t first_panel, std::int64_t stride, float* products) {
    float* sum = products + num_pairs_ * stride;
    const std::int64_t column = first_panel * kPanelColumns;
    for (std::int64_t t = 0; t < x_.rows; ++t) {
      std::fill_n(sum, stride, 0.0f);
      for (std::int64_t slot = 0; slot < slots(); ++slot) {
        const std::int64_t pair = pair_of_[static_cast<std::size_t>(t * slots() + slot)];
        if (pair < 0) continue;
        table_.add_scaled(products + pair * stride, slot < topk_ ? weights_[t * topk_ + slot] : 1.0f, stride, sum);
      }
      table_.store_row(sum, std::min(stride, out_.cols - column), out_.dtype,
                       static_cast<std::byte*>(out_.row(t)) + column * size_of(out_.dtype));
    }
  }

  const PackedExperts& experts_;
  const ConstMatrix& x_;
  const std::int32_t* ids_;
  const float* weights_;
  std::int64_t topk_;
  const GatedActivation& activation_;
  const Matrix& out_;
  const KernelTable& table_;
  std::vector<Group> groups_;
  std::vector<std::pair<const Group*, std::int64_t>> tiles_;
  std::vector<std::int64_t> tokens_;
  std::vector<std::int64_t> pair_of_;
  std::int64_t num_pairs_ = 0;
  std::int64_t work_ = 0;  // of all first projections
  float* inputs_ = nullptr;
  float* hidden_ = nullptr;
};

}  // namespace

PackedMlp::PackedMlp(const ConstMatrix& gate_up_weight, const ConstMatrix& down_weight)
    : gate_up(gate_up_weight, PanelOrder::GateUp), down(down_weight) {
  if (gate_up.in_features() != down.out_features() || gate_up.out_features() != 2 * down.in_features()) {
    throw InvalidArgument("gate_up " + shape(gate_up) + " and down " + shape(down) + ": expected [2I, H] and [H, I]");
  }
}

PackedExperts::PackedExperts(std::vector<PackedMlp> routed, std::optional<PackedMlp> shared)
    : routed_(std::move(routed)), shared_(std::move(shared)) {
  if (routed_.empty() && !shared_) throw InvalidArgument("no routed expert and no shared one");
  for (std::int64_t i = 0; i < num_routed() + (has_shared() ? 1 : 0); ++i) {
    if (mlp(i).gate_up.in_features() == hidden_size()) continue;
    throw InvalidArgument("gate_up " + shape(mlp(i).gate_up) + " of expert " + std::to_string(i) +
                          ": the first expert takes " + std::to_string(hidden_size()) + " columns");
  }
}

std::int64_t work_of(const PackedExperts& experts, std::int64_t tokens, std::int64_t topk) {
  const auto per_token = [&](std::int64_t index) {
    const PackedLinear& down = experts.mlp(index).down;
    return 3 * down.in_features() * down.out_features();
  };
  return tokens * ((experts.num_routed() > 0 ? topk * per_token(0) : 0) +
                   (experts.has_shared() ? per_token(experts.num_routed()) : 0));
}

void mixture(const PackedExperts& experts, const ConstMatrix& x, const std::int32_t* ids, const float* weights,
             std::int64_t topk, const GatedActivation& activation, const Matrix& out) {
  if (x.cols != experts.hidden_size()) {
    throw InvalidArgument("x of " + std::to_string(x.cols) + " columns: the experts take " +
                          std::to_string(experts.hidden_size()));
  }
  if (out.rows != x.rows || out.cols != x.cols || out.dtype != x.dtype) {
    throw InvalidArgument("out " + std::string(name_of(out.dtype)) + " [" + std::to_string(out.rows) + ", " +
                          std::to_string(out.cols) + "]: expected x's " + name_of(x.dtype) + " [" +
                          std::to_string(x.rows) + ", " + std::to_string(x.cols) + "]");
  }
  if (x.rows == 0) return;
  Mixture(experts, x, ids, weights, topk, activation, out).run();
}

}  // namespace tandem::cpu
