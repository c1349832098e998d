#include "elastic/view_store.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "net/frame.h"

namespace torchft_ext {
namespace {

constexpr size_t kLongestKey = 65536;
constexpr size_t kLongestValue = size_t{12} << 20U;
constexpr uint32_t kMostKeys = 65536;

void writeTexts(ByteWriter& writer, const std::vector<std::string>& texts) {
  writer.u32(static_cast<uint32_t>(texts.size()));
  for (const std::string& text : texts) writer.text(text);
}

std::vector<std::string> readTexts(ByteReader& reader, size_t longest) {
  std::vector<std::string> texts;
  const uint32_t count = reader.u32();
  if (count > kMostKeys) reader.fail();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) texts.push_back(reader.text(longest));
  return texts;
}

bool changes(StoreCall::What what) {
  return what != StoreCall::What::kGet && what != StoreCall::What::kCount;
}

int64_t numberIn(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

std::string encodeStoreCall(const StoreCall& call) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(call.what));
  writer.u64(call.view);
  writeTexts(writer, call.keys);
  writer.text(call.value);
  writer.text(call.expected);
  writer.i64(call.amount);
  writer.u8(call.wait ? 1 : 0);
  return writer.take();
}

std::optional<StoreCall> decodeStoreCall(std::string_view bytes) {
  ByteReader reader(bytes);
  StoreCall call;
  const uint8_t what = reader.u8();
  call.what = static_cast<StoreCall::What>(what);
  call.view = reader.u64();
  call.keys = readTexts(reader, kLongestKey);
  call.value = reader.text(kLongestValue);
  call.expected = reader.text(kLongestValue);
  call.amount = reader.i64();
  call.wait = reader.u8() != 0;
  const bool known = what >= 1 && what <= static_cast<uint8_t>(StoreCall::What::kAppend);
  const bool keyed = call.what == StoreCall::What::kCount || !call.keys.empty();
  if (!reader.atEnd() || !known || !keyed) return std::nullopt;
  return call;
}

std::string encodeStoreAnswer(const StoreAnswer& answer) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(answer.status));
  writeTexts(writer, answer.values);
  writer.i64(answer.number);
  return writer.take();
}

std::optional<StoreAnswer> decodeStoreAnswer(std::string_view bytes) {
  ByteReader reader(bytes);
  StoreAnswer answer;
  const uint8_t status = reader.u8();
  answer.status = static_cast<StoreAnswer::Status>(status);
  answer.values = readTexts(reader, kLongestValue);
  answer.number = reader.i64();
  if (!reader.atEnd() || status < 1 || status > 3) return std::nullopt;
  return answer;
}

void ViewStoreServer::begin(const View& view) {
  view_ = view.number;
  values_.clear();
  answered_.clear();
  for (auto& [caller, call] : std::exchange(pending_, {})) {
    if (call.view == view_ && !view.has(caller.first)) {
      reply_(caller.first, caller.second, {StoreAnswer::Status::kOver, {}, 0});
    } else {
      onCall(caller.first, caller.second, std::move(call));
    }
  }
}

void ViewStoreServer::onCall(const MemberId& from, uint64_t number, StoreCall call) {
  const Caller caller{from, number};
  if (call.view < view_) {
    reply_(from, number, {StoreAnswer::Status::kOver, {}, 0});
    return;
  }
  if (const auto known = answered_.find(caller); known != answered_.end()) {
    reply_(from, number, known->second);
    return;
  }
  if (call.view > view_) {
    if (pending_.size() < kMostPending) pending_.insert_or_assign(caller, std::move(call));
    return;
  }
  run(caller, call);
}

void ViewStoreServer::run(const Caller& caller, const StoreCall& call) {
  const std::optional<StoreAnswer> answer = answerTo(call);
  if (!answer) {
    if (pending_.size() < kMostPending) pending_.insert_or_assign(caller, call);
    return;
  }
  if (changes(call.what)) answered_[caller] = *answer;
  reply_(caller.first, caller.second, *answer);
  if (changes(call.what)) wakeWaiting();
}

// nullopt: it has to wait.
std::optional<StoreAnswer> ViewStoreServer::answerTo(const StoreCall& call) {
  StoreAnswer answer;
  if (call.what == StoreCall::What::kCount) {
    answer.number = static_cast<int64_t>(values_.size());
    return answer;
  }
  const std::string& key = call.keys.front();
  switch (call.what) {
    case StoreCall::What::kSet:
      values_[key] = call.value;
      break;
    case StoreCall::What::kAppend:
      values_[key] += call.value;
      break;
    case StoreCall::What::kRemove:
      answer.number = values_.erase(key) > 0 ? 1 : 0;
      break;
    case StoreCall::What::kAdd:
      answer.number = static_cast<int64_t>(static_cast<uint64_t>(numberIn(values_[key])) +
                                           static_cast<uint64_t>(call.amount));
      values_[key] = std::to_string(answer.number);
      break;
    case StoreCall::What::kCompareSet: {
      const auto found = values_.find(key);
      if (found == values_.end() ? call.expected.empty() : found->second == call.expected) {
        values_[key] = call.value;
        answer.values = {call.value};
      } else {
        answer.values = {found == values_.end() ? call.expected : found->second};
      }
      break;
    }
    default:
      for (const std::string& wanted : call.keys) {
        const auto found = values_.find(wanted);
        if (found == values_.end()) {
          if (call.wait) return std::nullopt;
          return StoreAnswer{StoreAnswer::Status::kMissing, {}, 0};
        }
        answer.values.push_back(found->second);
      }
  }
  return answer;
}

void ViewStoreServer::wakeWaiting() {
  for (auto waiting = pending_.begin(); waiting != pending_.end();) {
    const auto next = std::next(waiting);
    if (waiting->second.view == view_) {
      if (const std::optional<StoreAnswer> answer = answerTo(waiting->second)) {
        const Caller caller = waiting->first;
        pending_.erase(waiting);
        reply_(caller.first, caller.second, *answer);
      }
    }
    waiting = next;
  }
}

}  // namespace torchft_ext
