#include "comm/operation_dump.h"

#include <unistd.h>

#include <chrono>
#include <memory>

#include "base/host_name.h"
#include "base/text.h"

namespace torchft_ext {
namespace {

using State = OperationRecord::State;
using Snapshot = OperationRecorder::Snapshot;

constexpr const char* kTorchFormat = "2.10";  // of torch's recorder, whose entries these are
constexpr int64_t kOwnFormat = 1;
constexpr size_t kMostText = 4096;  // bytes of a name or a message

// The analyser of torch up to 2.14 knows a fixed list of backends, and takes the rest for a fault
// of the dump.
std::string torchsNameOf(const OperationRecord& record) {
  const char* const backend = record.on_device ? "nccl:" : "gloo:";
  const auto name = [&]() -> std::string {
    switch (record.kind) {
      case OpKind::kAllreduce:
      case OpKind::kSparseAllreduce:
        return "all_reduce";
      case OpKind::kAllgather:
        return "all_gather";
      case OpKind::kAlltoall:
        return "all_to_all";
      default:
        return toString(record.kind);
    }
  }();
  return backend + name;
}

const char* toString(State state) {
  switch (state) {
    case State::kScheduled:
      return "scheduled";
    case State::kStarted:
      return "started";
    case State::kCompleted:
      return "completed";
    case State::kFailed:
      return "failed";
  }
  return "unknown";
}

// Nanoseconds since 1970.
class WallClock {
 public:
  int64_t at(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(wall_ - (steady_ - time)).count();
  }
  int64_t now() const { return at(steady_); }

 private:
  const Clock::time_point steady_ = Clock::now();
  const std::chrono::nanoseconds wall_ = std::chrono::system_clock::now().time_since_epoch();
};

class Document {
 public:
  Document(DumpWriter& writer, DumpFor reader) : writer_(writer), reader_(reader) {}

  void write(const std::vector<Snapshot>& snapshots) {
    writer_.beginDict();
    writer_.key("version");
    writer_.text(kTorchFormat);
    writer_.key("pg_config");
    writer_.beginDict();
    for (const Snapshot& snapshot : snapshots) config(snapshot);
    writer_.endDict();
    writer_.key("entries");
    writer_.beginList();
    for (const Snapshot& snapshot : snapshots) entries(snapshot);
    writer_.endList();
    writer_.key("torchft_ext");
    own(snapshots);
    writer_.endDict();
  }

 private:
  // Another membership has another name: torch refuses one name with two.
  static std::string nameOf(const Snapshot& snapshot) {
    return cutText(snapshot.group, kMostText) + "/" + snapshot.generation.id;
  }

  void field(std::string_view key, std::string_view value) {
    writer_.key(key);
    writer_.text(cutText(value, kMostText));
  }
  void field(std::string_view key, int64_t value) {
    writer_.key(key);
    writer_.number(value);
  }

  void config(const Snapshot& snapshot) {
    std::string ranks = "[";
    for (int rank = 0; rank < snapshot.generation.size; ++rank)
      ranks += (rank == 0 ? "" : ", ") + std::to_string(rank);
    writer_.key(nameOf(snapshot));
    writer_.beginDict();
    field("name", nameOf(snapshot));
    field("desc", snapshot.group);
    field("ranks", ranks + "]");
    writer_.endDict();
  }

  void entries(const Snapshot& snapshot) {
    for (const OperationRecord& record : snapshot.operations) {
      if (reader_ == DumpFor::kTorch && record.collective == 0) continue;
      writer_.beginDict();
      identity(record, snapshot);
      tensors("input", record.input, record.dtype);
      tensors("output", record.output, record.dtype);
      course(record, snapshot.generation);
      writer_.endDict();
    }
  }

  void identity(const OperationRecord& record, const Snapshot& snapshot) {
    const bool message = !isCollective(record.kind);
    // torch takes the first number that all ranks still have for where to begin.
    const uint64_t id = reader_ == DumpFor::kTorch ? record.collective : record.number;
    field("record_id", static_cast<int64_t>(id));
    field("pg_id", 0);
    writer_.key("process_group");
    writer_.beginList();
    writer_.text(nameOf(snapshot));
    writer_.text(cutText(snapshot.group, kMostText));
    writer_.endList();
    field("generation", record.generation);
    field("operation", toString(record.kind));
    field("sequence_number", record.seq);
    field("collective_seq_id", static_cast<int64_t>(record.collective));
    field("p2p_seq_id", message ? record.seq : 0);
    field("op_id", static_cast<int64_t>(id));
    field("profiling_name", torchsNameOf(record));
    writer_.key("is_p2p");
    writer_.boolean(message);
    if (message) field("peer", record.peer);
    field("root", record.root);
  }

  void tensors(const std::string& side, const Shape& shape, DType dtype) {
    writer_.key(side + "_sizes");
    writer_.beginList();
    writer_.beginList();
    for (size_t i = 0; i < shape.dimensions; ++i) writer_.number(shape.sizes[i]);
    writer_.endList();
    writer_.endList();
    writer_.key(side + "_dtypes");
    writer_.beginList();
    writer_.text(toString(dtype));
    writer_.endList();
  }

  void course(const OperationRecord& record, const GenerationRecord& generation) {
    // An operation that was not complete when its generation failed has failed with it.
    const bool undone = record.state == State::kScheduled || record.state == State::kStarted;
    field("state", toString(undone && generation.failure ? State::kFailed : record.state));
    field("time_created_ns", clock_.at(record.issued));
    time("time_discovered_started_ns", record.started);
    time("time_discovered_completed_ns", record.ended);
    writer_.key("waited_for");
    writer_.beginList();
    for (size_t i = 0; i < record.waiters; ++i) writer_.number(record.waited_for[i]);
    writer_.endList();
    writer_.key("retired");
    writer_.boolean(!undone);
    writer_.key("frames");
    writer_.beginList();
    writer_.endList();
  }

  void time(std::string_view key, Clock::time_point at) {
    writer_.key(key);
    if (at == Clock::time_point()) return writer_.null();
    writer_.number(clock_.at(at));
  }

  void own(const std::vector<Snapshot>& snapshots) {
    writer_.beginDict();
    field("format", kOwnFormat);
    field("host", hostName());
    field("pid", ::getpid());
    field("time_ns", clock_.now());
    writer_.key("generations");
    writer_.beginList();
    for (const Snapshot& snapshot : snapshots) generation(snapshot);
    writer_.endList();
    writer_.endDict();
  }

  void generation(const Snapshot& snapshot) {
    const GenerationRecord& record = snapshot.generation;
    writer_.beginDict();
    field("group", snapshot.group);
    field("name", nameOf(snapshot));
    field("generation", record.number);
    field("id", record.id);
    field("rank", record.rank);
    field("size", record.size);
    field("first_rank", record.first_rank);
    writer_.key("members");
    writer_.beginList();
    for (const GenerationRecord::Member& each : record.members) member(each);
    writer_.endList();
    writer_.key("failure");
    failure(record.failure);
    writer_.endDict();
  }

  void member(const GenerationRecord::Member& member) {
    writer_.beginDict();
    field("host", member.host);
    field("pid", member.pid);
    writer_.endDict();
  }

  void failure(const FailurePtr& failure) {
    if (!failure) return writer_.null();
    writer_.beginDict();
    field("kind", torchft_ext::toString(failure->kind));
    field("message", failure->describe());
    field("rank", failure->cause.rank);
    field("how", failure->cause.how);
    field("operation", failure->op);
    field("sequence_number", failure->seq);
    field("time_ns", clock_.at(failure->at));
    writer_.endDict();
  }

  DumpWriter& writer_;
  const DumpFor reader_;
  const WallClock clock_{};
};

}  // namespace

std::string dumpOf(const std::vector<OperationRecorder::Snapshot>& snapshots, DumpFor reader) {
  std::unique_ptr<DumpWriter> writer;
  if (reader == DumpFor::kTorch)
    writer = std::make_unique<PickleWriter>();
  else
    writer = std::make_unique<JsonWriter>();
  Document(*writer, reader).write(snapshots);
  return writer->finish();
}

}  // namespace torchft_ext
