// The frames between a group's process and this one; what each means is in
// torchft_ext/_pg_frames.py, which is the other end. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext::child {

constexpr uint32_t kVersion = 1;
constexpr size_t kMostBytes = 16U << 20U;  // of a frame after its header
constexpr size_t kHeaderBytes = 5;

enum class Kind : uint8_t {
  kConfigure = 1,
  kIssue = 2,
  kStoreReply = 3,
  kQuit = 4,
  kMemory = 5,  // these are for engines on devices
  kForget = 6,
  kOrder = 7,
  kHello = 129,
  kConfigured = 130,
  kDone = 131,
  kStoreSet = 132,
  kStoreGet = 133,
  kStoreRemove = 134,
};

enum class RequestEnd : uint8_t { kGood = 0, kFailed = 1, kTimedOut = 2, kRefused = 3 };

// Bytes that are no frame: this process and its parent are not of one version.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Header {
  size_t bytes;  // that follow
  Kind kind;
};
Header parseHeader(std::string_view bytes);

struct Configure {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t limit_ms = 0;
  uint64_t heartbeat_ms = 0;
  bool local_sockets = true;
  uint16_t store_port = 0;
  std::string name;
  std::string address;
  std::string ports;
  std::string store_host;
  std::string prefix;
};
Configure parseConfigure(std::string_view payload);

struct Span {
  uint64_t offset = 0;  // in the arena; of device memory, the address in the parent
  uint64_t bytes = 0;
};
struct Issue {
  uint64_t number = 0;
  OpKind op = OpKind::kBarrier;
  DType item = DType::kUint8;
  ReduceKind reduction = ReduceKind::kSum;
  int32_t peer = -1;  // or the root
  uint32_t tag = 0;
  bool flat = false;  // see StreamSide
  uint64_t limit_ms = 0;
  std::vector<Span> outputs;
  std::vector<Span> inputs;
};
Issue parseIssue(std::string_view payload);

// Device memory that the parent lends: an allocation, by its address there.
struct LentMemory {
  uint64_t address = 0;
  uint64_t bytes = 0;
  int32_t device = 0;
  std::string handle;
};
LentMemory parseMemory(std::string_view payload);
// The address of one that is not lent any more.
uint64_t parseForget(std::string_view payload);

// What is issued from now on waits for this event of the parent's.
struct StreamOrder {
  uint32_t event = 0;
  int32_t device = 0;
  std::string handle;  // empty: the event is known
};
StreamOrder parseOrder(std::string_view payload);

struct ParentsAnswer {
  uint32_t number = 0;  // of the request
  RequestEnd outcome = RequestEnd::kGood;
  std::vector<std::string> values;  // kFailed: why
};
ParentsAnswer parseParentsAnswer(std::string_view payload);

std::string helloFrame();
std::string configuredFrame(RequestEnd outcome, const std::string& text);
std::string doneFrame(uint64_t number, RequestEnd outcome, int32_t source, const std::string& text);
std::string storeSetFrame(uint32_t number, const std::string& key, const std::string& value);
std::string storeGetFrame(uint32_t number, const std::vector<std::string>& keys);
std::string storeRemoveFrame(uint32_t number, const std::string& key);

}  // namespace torchft_ext::child
