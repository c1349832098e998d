#include "child/protocol.h"

#include <array>
#include <bit>

#include "base/text.h"

namespace torchft_ext::child {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers in frames are little-endian");

constexpr size_t kMostText = 0xFFFF;

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename Number>
  Number number() {
    Number value;
    take(sizeof value).copy(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number<uint16_t>())); }
  std::string bytes() { return std::string(take(number<uint32_t>())); }
  size_t left() const { return rest_.size(); }
  void end() const {
    if (!rest_.empty()) throw ProtocolError(std::to_string(rest_.size()) + " bytes too many");
  }

 private:
  std::string_view take(size_t count) {
    if (count > rest_.size())
      throw ProtocolError(std::to_string(count - rest_.size()) + " bytes too few");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  std::string_view rest_;
};

class Writer {
 public:
  template <typename Number>
  Writer& number(Number value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view text) {
    const std::string cut = cutText(text, kMostText);
    number(static_cast<uint16_t>(cut.size()));
    bytes_.append(cut);
    return *this;
  }
  Writer& bytes(std::string_view bytes) {
    number(static_cast<uint32_t>(bytes.size()));
    bytes_.append(bytes);
    return *this;
  }
  std::string frame(Kind kind) const {
    Writer whole;
    whole.number(static_cast<uint32_t>(bytes_.size())).number(static_cast<uint8_t>(kind));
    return whole.bytes_ + bytes_;
  }

 private:
  std::string bytes_;
};

constexpr std::array kOps{OpKind::kAllreduce,     OpKind::kBroadcast, OpKind::kAllgather,
                          OpKind::kReduceScatter, OpKind::kReduce,    OpKind::kGather,
                          OpKind::kScatter,       OpKind::kAlltoall,  OpKind::kSend,
                          OpKind::kRecv,          OpKind::kBarrier};
constexpr std::array kItems{DType::kFloat, DType::kDouble, DType::kHalf,  DType::kBFloat16,
                            DType::kInt8,  DType::kInt16,  DType::kInt32, DType::kInt64,
                            DType::kUint8, DType::kBool};
constexpr std::array kReductions{ReduceKind::kSum, ReduceKind::kProduct, ReduceKind::kMin,
                                 ReduceKind::kMax, ReduceKind::kBand,    ReduceKind::kBor,
                                 ReduceKind::kBxor};

template <typename Values>
auto oneOf(const Values& values, uint8_t number, const char* what) {
  if (number >= values.size())
    throw ProtocolError(std::string(what) + " " + std::to_string(number));
  return values[number];
}

std::vector<Span> spansFrom(Reader& reader, uint32_t count) {
  if (count > reader.left() / (2 * sizeof(uint64_t))) throw ProtocolError("spans too few");
  std::vector<Span> spans(count);
  for (Span& span : spans) {
    span.offset = reader.number<uint64_t>();
    span.bytes = reader.number<uint64_t>();
  }
  return spans;
}

}  // namespace

Header parseHeader(std::string_view bytes) {
  Reader reader(bytes);
  const auto count = reader.number<uint32_t>();
  const auto kind = static_cast<Kind>(reader.number<uint8_t>());
  if (count > kMostBytes) throw ProtocolError("a frame of " + std::to_string(count) + " bytes");
  return {count, kind};
}

Configure parseConfigure(std::string_view payload) {
  Reader reader(payload);
  Configure told;
  told.rank = reader.number<int32_t>();
  told.size = reader.number<int32_t>();
  told.limit_ms = reader.number<uint64_t>();
  told.heartbeat_ms = reader.number<uint64_t>();
  told.local_sockets = reader.number<uint8_t>() != 0;
  told.store_port = reader.number<uint16_t>();
  told.name = reader.text();
  told.address = reader.text();
  told.ports = reader.text();
  told.store_host = reader.text();
  told.prefix = reader.text();
  reader.end();
  if (told.size < 1 || told.rank < 0 || told.rank >= told.size)
    throw ProtocolError("rank " + std::to_string(told.rank) + " of " + std::to_string(told.size));
  return told;
}

Issue parseIssue(std::string_view payload) {
  Reader reader(payload);
  Issue issue;
  issue.number = reader.number<uint64_t>();
  issue.op = oneOf(kOps, reader.number<uint8_t>(), "operation");
  issue.item = oneOf(kItems, reader.number<uint8_t>(), "item");
  issue.reduction = oneOf(kReductions, reader.number<uint8_t>(), "reduction");
  issue.flat = reader.number<uint8_t>() != 0;
  issue.peer = reader.number<int32_t>();
  issue.tag = reader.number<uint32_t>();
  issue.limit_ms = reader.number<uint64_t>();
  const auto outputs = reader.number<uint32_t>();
  const auto inputs = reader.number<uint32_t>();
  issue.outputs = spansFrom(reader, outputs);
  issue.inputs = spansFrom(reader, inputs);
  reader.end();
  return issue;
}

LentMemory parseMemory(std::string_view payload) {
  Reader reader(payload);
  LentMemory memory;
  memory.address = reader.number<uint64_t>();
  memory.bytes = reader.number<uint64_t>();
  memory.device = reader.number<int32_t>();
  memory.handle = reader.bytes();
  reader.end();
  return memory;
}

uint64_t parseForget(std::string_view payload) {
  Reader reader(payload);
  const auto address = reader.number<uint64_t>();
  reader.end();
  return address;
}

StreamOrder parseOrder(std::string_view payload) {
  Reader reader(payload);
  StreamOrder order;
  order.event = reader.number<uint32_t>();
  order.device = reader.number<int32_t>();
  order.handle = reader.bytes();
  reader.end();
  return order;
}

ParentsAnswer parseParentsAnswer(std::string_view payload) {
  Reader reader(payload);
  ParentsAnswer answer;
  answer.number = reader.number<uint32_t>();
  answer.outcome = static_cast<RequestEnd>(reader.number<uint8_t>());
  const auto count = reader.number<uint32_t>();
  if (count > reader.left() / sizeof(uint32_t)) throw ProtocolError("values too few");
  for (uint32_t i = 0; i < count; ++i) answer.values.push_back(reader.bytes());
  reader.end();
  return answer;
}

std::string helloFrame() {
  return Writer().number(kVersion).frame(Kind::kHello);
}

std::string configuredFrame(RequestEnd outcome, const std::string& text) {
  return Writer().number(static_cast<uint8_t>(outcome)).text(text).frame(Kind::kConfigured);
}

std::string doneFrame(uint64_t number, RequestEnd outcome, int32_t source,
                      const std::string& text) {
  Writer writer;
  writer.number(number).number(static_cast<uint8_t>(outcome)).number(source).text(text);
  return writer.frame(Kind::kDone);
}

std::string storeSetFrame(uint32_t number, const std::string& key, const std::string& value) {
  return Writer().number(number).text(key).bytes(value).frame(Kind::kStoreSet);
}

std::string storeGetFrame(uint32_t number, const std::vector<std::string>& keys) {
  Writer writer;
  writer.number(number).number(static_cast<uint32_t>(keys.size()));
  for (const std::string& key : keys) writer.text(key);
  return writer.frame(Kind::kStoreGet);
}

std::string storeRemoveFrame(uint32_t number, const std::string& key) {
  return Writer().number(number).text(key).frame(Kind::kStoreRemove);
}

}  // namespace torchft_ext::child
