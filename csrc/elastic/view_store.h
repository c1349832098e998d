// The key-value store of one view, served by its first member over the members' own connections:
// where generations of the view's groups meet, and what torch's tables hold as the groups' store.
// It ends with its view, as any member's end does.
//
// ViewStoreServer: owner: an ElasticMember; loop thread only. The calls and answers are values;
// decoding is total and bounded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "elastic/view.h"

namespace torchft_ext {

struct StoreCall {
  enum class What : uint8_t {
    kSet = 1,         // keys[0] = value
    kGet = 2,         // all of keys; wait: until they are there
    kCompareSet = 3,  // keys[0]: from expected (empty: nothing) to value; what stands there then
    kAdd = 4,         // keys[0], a decimal number (nothing: 0): plus amount; the sum
    kRemove = 5,      // keys[0]: number: was there something?
    kCount = 6,       // number: of keys
    kAppend = 7,      // keys[0] += value
  };
  What what = What::kGet;
  uint64_t view = 0;
  std::vector<std::string> keys;
  std::string value;
  std::string expected;
  int64_t amount = 0;
  bool wait = false;
};

struct StoreAnswer {
  enum class Status : uint8_t {
    kOk = 1,
    kMissing = 2,  // kGet: a key is not there
    kOver = 3,     // the view is over
  };
  Status status = Status::kOk;
  std::vector<std::string> values;
  int64_t number = 0;
};

std::string encodeStoreCall(const StoreCall& call);
std::optional<StoreCall> decodeStoreCall(std::string_view bytes);
std::string encodeStoreAnswer(const StoreAnswer& answer);
std::optional<StoreAnswer> decodeStoreAnswer(std::string_view bytes);

class ViewStoreServer {
 public:
  static constexpr size_t kLongestCall = size_t{8} << 20U;  // bytes of keys and values
  static constexpr size_t kMostPending = 65536;  // calls that wait for keys or for their view
  using Reply = std::function<void(const MemberId& to, uint64_t number, const StoreAnswer& answer)>;

  explicit ViewStoreServer(Reply reply) : reply_(std::move(reply)) {}

  // This view has begun: earlier ones' keys are dropped, and who waits for them is told so. So is
  // who has called early, and is no member of it.
  void begin(const View& view);
  // number: of the call, by its caller; a call that comes again is answered as the first time. It
  // may come before its view has begun here; else its caller is a member.
  void onCall(const MemberId& from, uint64_t number, StoreCall call);
  size_t size() const { return values_.size(); }

 private:
  using Caller = std::pair<MemberId, uint64_t>;
  void run(const Caller& caller, const StoreCall& call);
  std::optional<StoreAnswer> answerTo(const StoreCall& call);
  void wakeWaiting();

  const Reply reply_;
  uint64_t view_ = 0;
  std::map<std::string, std::string> values_;
  std::map<Caller, StoreCall> pending_;
  std::map<Caller, StoreAnswer> answered_;  // of this view, what must not be done twice
};

}  // namespace torchft_ext
