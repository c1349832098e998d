// Schedules of the kinds that reduce: allreduce, reduce_scatter, reduce.
#include <algorithm>
#include <utility>

#include "host/schedule_builder.h"

namespace torchft_ext {
namespace {

constexpr int kNone = ScheduleBuilder::kNone;

size_t itemOf(const ScheduleBuilder& builder) {
  return itemSize(builder.operation().dtype);
}

// ---------------------------------------------------------------- owner-direct
//
// Each rank owns a slice: it receives that slice from every other rank, reduces in one fixed order,
// and hands the result on. All connections carry traffic at once, each rank starting with another
// neighbour, chunk after chunk.

struct OwnerPlan {
  std::vector<Buffer> sources;  // by owner: what this rank contributes
  Buffer own;                   // where this rank's slice is accumulated
  std::vector<Buffer> results;  // by owner: where its slice lands here; no bytes: it does not
  int receiver = kEveryone;     // who gets the slices: a rank, or one of
  static constexpr int kEveryone = -1;
  static constexpr int kNobody = -2;

  bool isReceiver(int rank) const { return receiver == kEveryone || receiver == rank; }
};

class OwnerDirect {
 public:
  OwnerDirect(ScheduleBuilder& builder, const OwnerPlan& plan) : builder_(builder), plan_(plan) {
    chunks_ = Chunking::of(longestOf(plan.sources), builder.tuning());
    sent_.assign(plan.sources.size(), std::vector<int>(chunks_.count, kNone));
    reduced_.assign(chunks_.count, kNone);
  }

  void build() {
    for (size_t i = 0; i < chunks_.count + kLag; ++i) {
      if (i < chunks_.count) reduceChunk(i);
      if (i >= kLag) deliverChunk(i - kLag);
    }
  }

 private:
  // How many chunks later a reduced chunk is sent on: meanwhile the connections carry the next
  // ones.
  static constexpr size_t kLag = 2;

  void reduceChunk(size_t index) {
    for (int k = 1; k < builder_.size(); ++k) {
      const auto owner = static_cast<size_t>(builder_.neighbour(k));
      sent_[owner][index] =
          builder_.send(static_cast<int>(owner), chunks_.piece(plan_.sources[owner], index));
    }
    const Buffer own = chunks_.piece(plan_.own, index);
    const Buffer source = chunks_.piece(plan_.sources[static_cast<size_t>(builder_.rank())], index);
    // The copy waits for an earlier chunk, so that it happens shortly before the data is needed,
    // not all at the start.
    int last = builder_.copy(own, source.data, {index >= kLag ? reduced_[index - kLag] : kNone});
    for (int k = 1; k < builder_.size(); ++k) {
      last = builder_.recvReduce(builder_.neighbour(-k), own, {last});
    }
    reduced_[index] = builder_.averageIfAsked(own, {last});
  }

  void deliverChunk(size_t index) {
    const Buffer own = chunks_.piece(plan_.own, index);
    for (int k = 1; k < builder_.size(); ++k) {
      const int receiver = builder_.neighbour(k);
      if (plan_.isReceiver(receiver)) builder_.send(receiver, own, {reduced_[index]});
    }
    if (!plan_.isReceiver(builder_.rank())) return;
    for (int k = 1; k < builder_.size(); ++k) {
      const auto owner = static_cast<size_t>(builder_.neighbour(-k));
      builder_.recv(static_cast<int>(owner), chunks_.piece(plan_.results[owner], index),
                    {sent_[owner][index]});
    }
  }

  ScheduleBuilder& builder_;
  const OwnerPlan& plan_;
  Chunking chunks_;
  std::vector<std::vector<int>> sent_;  // by owner and chunk: this rank's contribution went out
  std::vector<int> reduced_;            // by chunk of this rank's slice
};

// ---------------------------------------------------------------- recursive doubling

// log2(W) exchanges of the whole buffer. Both partners compute f(lower rank's, higher rank's), with
// the operands in this order, so that the result has the same bits everywhere, -0.0 and NaN
// included. The higher one computes it in the buffer it received into, which from then on holds its
// value.
class RecursiveDoubling {
 public:
  explicit RecursiveDoubling(ScheduleBuilder& builder)
      : builder_(builder), whole_(builder.operation().outputs[0]), value_(whole_) {
    while (core_ * 2 <= builder.size()) core_ *= 2;
  }

  // The ranks past the largest power of two hand their values to one below, and get the result from
  // it.
  void build() {
    const int rest = builder_.size() - core_;
    const int rank = builder_.rank();
    if (rank >= core_) {
      const int sent = builder_.send(rank - core_, whole_);
      builder_.recv(rank - core_, whole_, {sent});
      return;
    }
    if (rank < rest) ready_ = builder_.recvReduce(rank + core_, whole_);
    for (int distance = 1; distance < core_; distance *= 2) exchangeWith(rank ^ distance);
    ready_ = builder_.averageIfAsked(value_, {ready_});
    if (value_.data != whole_.data) {
      ready_ = builder_.copy(whole_, value_.data, {ready_, last_sent_from_whole_});
    }
    if (rank < rest) builder_.send(rank + core_, whole_, {ready_});
  }

 private:
  void exchangeWith(int partner) {
    const Buffer theirs = builder_.scratch(whole_.bytes);
    const int sent = builder_.send(partner, value_, {ready_});
    const int received = builder_.recv(partner, theirs);
    if (value_.data == whole_.data) last_sent_from_whole_ = sent;
    if (builder_.rank() < partner) {
      ready_ = builder_.reduce(value_, theirs.data, {received, sent});
    } else {
      ready_ = builder_.reduce(theirs, value_.data, {received, ready_});
      value_ = theirs;
    }
  }

  ScheduleBuilder& builder_;
  const Buffer whole_;
  Buffer value_;  // what is reduced so far
  int core_ = 1;
  int ready_ = kNone;
  int last_sent_from_whole_ = kNone;
};

// ---------------------------------------------------------------- ring

// Each slice travels once round the ring being reduced, and once more being copied; chunks follow
// each other.
class Ring {
 public:
  explicit Ring(ScheduleBuilder& builder)
      : builder_(builder),
        slices_(splitEvenly(builder.operation().outputs[0], builder.size(), itemOf(builder))) {
    chunks_ = Chunking::of(longestOf(slices_), builder.tuning());
    ready_.assign(chunks_.count, kNone);
    sent_.assign(slices_.size(), std::vector<int>(chunks_.count, kNone));
  }

  void build() {
    const int rounds = builder_.size() - 1;
    for (int round = 0; round < rounds; ++round) reduceRound(round);
    average();
    for (int round = 0; round < rounds; ++round) copyRound(round);
  }

 private:
  size_t sliceAt(int distance) const { return static_cast<size_t>(builder_.neighbour(distance)); }

  void reduceRound(int round) {
    const size_t out = sliceAt(-round);
    const size_t in = sliceAt(-round - 1);
    for (size_t c = 0; c < chunks_.count; ++c) {
      sent_[out][c] =
          builder_.send(builder_.neighbour(1), chunks_.piece(slices_[out], c), {ready_[c]});
      ready_[c] = builder_.recvReduce(builder_.neighbour(-1), chunks_.piece(slices_[in], c));
    }
  }

  void average() {
    const size_t own = sliceAt(1);
    for (size_t c = 0; c < chunks_.count; ++c) {
      ready_[c] = builder_.averageIfAsked(chunks_.piece(slices_[own], c), {ready_[c]});
    }
  }

  void copyRound(int round) {
    const size_t out = sliceAt(1 - round);
    const size_t in = sliceAt(-round);
    for (size_t c = 0; c < chunks_.count; ++c) {
      builder_.send(builder_.neighbour(1), chunks_.piece(slices_[out], c), {ready_[c]});
      ready_[c] =
          builder_.recv(builder_.neighbour(-1), chunks_.piece(slices_[in], c), {sent_[in][c]});
    }
  }

  ScheduleBuilder& builder_;
  const std::vector<Buffer> slices_;
  Chunking chunks_;
  std::vector<int> ready_;  // by chunk: what the last round received
  std::vector<std::vector<int>>
      sent_;  // by slice and chunk: sent while reducing, so it may be overwritten
};

// ---------------------------------------------------------------- tree

// A binomial tree towards the root: for few bytes, where the number of rounds counts.
void buildReduceTree(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  const int size = builder.size();
  const bool is_root = builder.rank() == operation.root;
  const int position = builder.neighbour(-operation.root);
  const Buffer input = operation.inputs[0];
  const bool is_leaf = !is_root && (position % 2 == 1 || position + 1 == size);
  const Buffer value =
      is_root ? operation.outputs[0] : (is_leaf ? input : builder.scratch(input.bytes));
  int ready = builder.copy(value, input.data);
  for (int distance = 1; distance < size; distance *= 2) {
    if ((position & distance) != 0) {
      builder.send(builder.neighbour(-distance), value, {ready});
      return;
    }
    if (position + distance < size) {
      ready = builder.recvReduce(builder.neighbour(distance), value, {ready});
    }
  }
  builder.averageIfAsked(value, {ready});
}

void buildReduceDirect(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  const auto rank = static_cast<size_t>(builder.rank());
  OwnerPlan plan;
  plan.receiver = operation.root;
  plan.sources = splitEvenly(operation.inputs[0], builder.size(), itemOf(builder));
  if (builder.rank() == operation.root) {
    plan.results = splitEvenly(operation.outputs[0], builder.size(), itemOf(builder));
    plan.own = plan.results[rank];
  } else {
    plan.own = builder.scratch(plan.sources[rank].bytes);
  }
  OwnerDirect(builder, plan).build();
}

}  // namespace

void scaleContribution(ScheduleBuilder& builder, Operation& operation) {
  if (operation.inputs.empty()) {  // allreduce
    builder.scaleFirst(operation.outputs[0], operation.outputs[0].data);
    return;
  }
  const bool is_root = operation.kind == OpKind::kReduce && !operation.outputs.empty();
  for (Buffer& input : operation.inputs) {
    const Buffer product = is_root ? operation.outputs[0] : builder.scratch(input.bytes);
    builder.scaleFirst(product, input.data);
    input = product;
  }
}

void buildAllreduce(ScheduleBuilder& builder) {
  const Buffer whole = builder.operation().outputs[0];
  if (whole.bytes <= builder.tuning().small_bytes) {
    RecursiveDoubling(builder).build();
  } else if (builder.size() > builder.tuning().direct_world) {
    Ring(builder).build();
  } else {
    OwnerPlan plan;
    plan.sources = splitEvenly(whole, builder.size(), itemOf(builder));
    plan.results = plan.sources;
    plan.own = plan.sources[static_cast<size_t>(builder.rank())];
    OwnerDirect(builder, plan).build();
  }
}

void buildReduceScatter(ScheduleBuilder& builder) {
  OwnerPlan plan;
  plan.receiver = OwnerPlan::kNobody;
  plan.sources = builder.operation().inputs;
  plan.own = builder.operation().outputs[0];
  OwnerDirect(builder, plan).build();
}

void buildReduce(ScheduleBuilder& builder) {
  if (builder.operation().inputs[0].bytes <= builder.tuning().small_bytes) {
    buildReduceTree(builder);
  } else {
    buildReduceDirect(builder);
  }
}

}  // namespace torchft_ext
