#include "c10d/store/member_store.h"

#include <c10/util/Exception.h>

#include <utility>

#include "comm/op_state.h"

namespace torchft_ext {
namespace {

std::string textOf(const MemberStore::Bytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

MemberStore::Bytes bytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

bool keepWaiting() {
  runWaitHook();
  return false;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> MemberStore::clone() {
  auto copy = c10::make_intrusive<MemberStore>(member_, view_);
  copy->setTimeout(timeout_);
  return copy;
}

StoreCall MemberStore::make(StoreCall::What what, const std::string& key) const {
  StoreCall call;
  call.what = what;
  call.view = view_;
  call.keys = {key};
  return call;
}

StoreAnswer MemberStore::call(StoreCall call, std::chrono::milliseconds limit) const {
  const Deadline deadline =
      limit == kNoTimeout ? Deadline::after(kDefaultTimeout) : Deadline::after(limit);
  const auto member = member_.lock();
  if (!member) {
    C10_THROW_ERROR(DistStoreError,
                    "the store of view " + std::to_string(view_) + ": this member has ended");
  }
  try {
    return member->callStore(std::move(call), deadline, keepWaiting);
  } catch (const StoreError& error) {
    // Others look for torch's own words of a key that did not come in time.
    const char* words = deadline.expired() ? "wait timeout: " : "";
    C10_THROW_ERROR(DistStoreError, std::string(words) + error.what());
  }
}

void MemberStore::set(const std::string& key, const Bytes& value) {
  StoreCall set = make(StoreCall::What::kSet, key);
  set.value = textOf(value);
  call(std::move(set), timeout_);
}

MemberStore::Bytes MemberStore::compareSet(const std::string& key, const Bytes& expected,
                                           const Bytes& desired) {
  StoreCall compare = make(StoreCall::What::kCompareSet, key);
  compare.expected = textOf(expected);
  compare.value = textOf(desired);
  return bytesOf(call(std::move(compare), timeout_).values.at(0));
}

MemberStore::Bytes MemberStore::get(const std::string& key) {
  return std::move(multiGet({key}).front());
}

int64_t MemberStore::add(const std::string& key, int64_t value) {
  StoreCall add = make(StoreCall::What::kAdd, key);
  add.amount = value;
  return call(std::move(add), timeout_).number;
}

bool MemberStore::deleteKey(const std::string& key) {
  return call(make(StoreCall::What::kRemove, key), timeout_).number != 0;
}

bool MemberStore::check(const Keys& keys) {
  if (keys.empty()) return true;
  StoreCall get = make(StoreCall::What::kGet, {});
  get.keys = keys;
  return call(std::move(get), timeout_).status == StoreAnswer::Status::kOk;
}

int64_t MemberStore::getNumKeys() {
  return call(make(StoreCall::What::kCount, {}), timeout_).number;
}

void MemberStore::wait(const Keys& keys) {
  wait(keys, timeout_);
}

void MemberStore::wait(const Keys& keys, const std::chrono::milliseconds& timeout) {
  if (keys.empty()) return;
  StoreCall get = make(StoreCall::What::kGet, {});
  get.keys = keys;
  get.wait = true;
  call(std::move(get), timeout);
}

void MemberStore::append(const std::string& key, const Bytes& value) {
  StoreCall append = make(StoreCall::What::kAppend, key);
  append.value = textOf(value);
  call(std::move(append), timeout_);
}

std::vector<MemberStore::Bytes> MemberStore::multiGet(const Keys& keys) {
  if (keys.empty()) return {};
  StoreCall get = make(StoreCall::What::kGet, {});
  get.keys = keys;
  get.wait = true;
  std::vector<Bytes> found;
  for (const std::string& value : call(std::move(get), timeout_).values) {
    found.push_back(bytesOf(value));
  }
  return found;
}

void MemberStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: expected as many values as keys, ",
                    keys.size(), ", found ", values.size());
  for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
}

}  // namespace torchft_ext
