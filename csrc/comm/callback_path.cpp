#include "comm/callback_path.h"

#include <utility>

namespace torchft_ext {
namespace {

enum : uint64_t { kCollective = 1, kCallback = 2, kNested = 3 };

thread_local CallbackScope* present_scope = nullptr;

// splitmix64's finaliser: every bit of the value moves every bit of the hash.
uint64_t mixed(uint64_t hash, uint64_t value) {
  hash += 0x9e3779b97f4a7c15U + value;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9U;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebU;
  return hash ^ (hash >> 31);
}

}  // namespace

uint64_t placeOf(const std::string& group, int64_t generation) {
  uint64_t hash = static_cast<uint64_t>(generation);
  for (const char letter : group) hash = mixed(hash, static_cast<uint8_t>(letter));
  return hash;
}

CallbackPath CallbackPath::ofCollective(uint64_t place, uint64_t index, const char* what,
                                        int64_t seq) {
  CallbackPath path;
  path.place_ = place;
  path.across_ = place;
  path.what_ = what;
  path.seq_ = seq;
  return path.extended(kCollective, index);
}

CallbackPath CallbackPath::extended(uint64_t what, uint64_t number) const {
  CallbackPath path(*this);
  path.within_ = mixed(mixed(within_, what), number);
  path.across_ = mixed(mixed(across_, what), number);
  return path;
}

CallbackPath CallbackPath::callback(uint64_t index) const {
  return extended(kCallback, index);
}

CallbackPath CallbackPath::collective(uint64_t place, uint64_t ordinal) const {
  CallbackPath path = extended(kNested, ordinal);
  path.across_ = mixed(path.across_, place);
  path.one_place_ = one_place_ && place == place_;
  return path;
}

std::string CallbackPath::root() const {
  return std::string(what_) + " #" + std::to_string(seq_);
}

uint64_t CallbackPath::nameIn(uint64_t place) const {
  return one_place_ && place == place_ ? within_ : across_;
}

std::string inCallbackOf(const std::string& what, const CallbackPath& path) {
  return what + " issued in a callback of " + path.root();
}

CallbackScope::CallbackScope(std::optional<CallbackPath> path)
    : path_(path), outer_(std::exchange(present_scope, this)) {}

CallbackScope::~CallbackScope() {
  present_scope = outer_;
}

CallbackScope* CallbackScope::present() {
  return present_scope;
}

std::optional<CallbackPath> CallbackScope::next(uint64_t place) {
  if (!path_) return std::nullopt;
  return path_->collective(place, issued_[place]++);
}

}  // namespace torchft_ext
