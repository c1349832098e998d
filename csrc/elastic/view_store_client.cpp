#include "elastic/view_store_client.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace torchft_ext {
namespace {

void checkLength(const StoreCall& call) {
  size_t bytes = call.value.size() + call.expected.size();
  for (const std::string& key : call.keys) bytes += key.size();
  if (bytes <= ViewStoreServer::kLongestCall) return;
  throw StoreError("the store of view " + std::to_string(call.view) + ": expected at most " +
                   std::to_string(ViewStoreServer::kLongestCall) + " bytes in a call, found " +
                   std::to_string(bytes));
}

}  // namespace

StoreAnswer ViewStoreClient::call(StoreCall call, Deadline deadline, const Cancelled& cancelled) {
  checkLength(call);
  const std::string where = "the store of view " + std::to_string(call.view);
  const auto pending = std::make_shared<Pending>();
  pending->call = std::move(call);
  uint64_t number = 0;
  {
    const MutexLock lock(mutex_);
    number = next_++;
    pending_[number] = pending;
  }
  const bool posted = loop_.post([this, number] { sendAgain(number); });
  const MutexLock lock(mutex_);
  try {
    const auto done = [&] { return pending->answer || pending->lost; };
    if (posted) waitUntilDone(mutex_, changed_, done, deadline, cancelled);
  } catch (...) {
    pending_.erase(number);
    throw;
  }
  pending_.erase(number);
  if (!posted) throw StoreError(where + ": this member has ended");
  if (pending->answer && pending->answer->status != StoreAnswer::Status::kOver) {
    return std::move(*pending->answer);
  }
  const bool over = pending->answer || pending->lost;
  throw StoreError(where + (over ? ": the view is over, or the store's host is lost"
                                 : ": no answer by the deadline"));
}

void ViewStoreClient::sendAgain(uint64_t number) {
  StoreCall call;
  {
    const MutexLock lock(mutex_);
    const auto found = pending_.find(number);
    if (found == pending_.end()) return;
    call = found->second->call;
  }
  if (ended_ || !host_ || view_ > call.view || over_ >= call.view) {
    onAnswer(number, std::nullopt);
  } else {
    send_(*host_, number, call);
  }
}

void ViewStoreClient::begin(const View& view) {
  view_ = view.number;
  host_ = view.members.empty() ? std::nullopt : std::optional(view.members.front().id);
  failBefore(view_);
  if (host_) connectedAgain(*host_);
}

void ViewStoreClient::stop(uint64_t view) {
  over_ = std::max(over_, view);
  failBefore(over_ + 1);
}

void ViewStoreClient::connectedAgain(const MemberId& id) {
  if (host_ != id) return;
  std::vector<uint64_t> numbers;
  {
    const MutexLock lock(mutex_);
    for (const auto& [number, pending] : pending_) numbers.push_back(number);
  }
  for (const uint64_t number : numbers) sendAgain(number);
}

void ViewStoreClient::onLost(const MemberId& id) {
  if (host_ == id) failBefore(view_ + 1);
}

void ViewStoreClient::onAnswer(uint64_t number, std::optional<StoreAnswer> answer) {
  const MutexLock lock(mutex_);
  const auto found = pending_.find(number);
  if (found == pending_.end()) return;
  found->second->lost = !answer;
  found->second->answer = std::move(answer);
  pending_.erase(found);
  changed_.notifyAll();
}

std::optional<MemberId> ViewStoreClient::awaitedHost() const {
  const MutexLock lock(mutex_);
  return pending_.empty() ? std::nullopt : host_;
}

void ViewStoreClient::end() {
  constexpr uint64_t kEvery = ~uint64_t{0};
  ended_ = true;
  failBefore(kEvery);
}

void ViewStoreClient::failBefore(uint64_t view) {
  const MutexLock lock(mutex_);
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    const auto next = std::next(pending);
    if (pending->second->call.view < view) {
      pending->second->lost = true;
      pending_.erase(pending);
    }
    pending = next;
  }
  changed_.notifyAll();
}

}  // namespace torchft_ext
