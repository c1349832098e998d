#include "host/long_waits.h"

#include <utility>

namespace torchft_ext {
namespace {

// A member asks once a second.
constexpr Duration kTellEvery = WaitInquiry::kAskEvery / 4;
// Each is looked for among all that are pending.
constexpr size_t kMostMessagesAskedOf = 100;

}  // namespace

LongWaits::LongWaits(EventLoop& loop, std::shared_ptr<Lifecycle> lifecycle, const Roster& roster,
                     const GenerationConnections& connections)
    : loop_(loop),
      lifecycle_(std::move(lifecycle)),
      roster_(roster),
      connections_(connections),
      times_(std::make_shared<WaitTimes>(size())),
      told_at_(static_cast<size_t>(size()), Clock::time_point::min()) {}

void LongWaits::begin(Queues queues, const Post& post) {
  queues_ = std::move(queues);
  inquiry_ = std::make_unique<WaitInquiry>(size(), times_, inquiryCallbacks());
  lifecycle_->listenToWaits(
      [weak = weak_from_this(), post](const Lifecycle::Operations& operations) {
        post([weak, operations] {
          if (const auto self = weak.lock()) self->onWaits(operations);
        });
      });
}

void LongWaits::end() {
  lifecycle_->listenToWaits(nullptr);
  inquiry_.reset();
}

WaitInquiry::Callbacks LongWaits::inquiryCallbacks() {
  WaitInquiry::Callbacks callbacks;
  callbacks.ask = [this](int peer, uint64_t place) {
    FrameHeader question;
    question.type = FrameType::kQuestion;
    question.seq = place;
    connections_.along(kControl)[static_cast<size_t>(peer)]->sendText(question, {});
  };
  callbacks.wake = [this](Clock::time_point when) {
    loop_.runAt(when, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self && self->inquiry_) self->inquiry_->settle(Clock::now());
    });
  };
  callbacks.name = [this](int peer) {
    const MemberRecord& member = roster_.members[static_cast<size_t>(peer)];
    return "rank " + std::to_string(peer) + " (host " + member.host + ", pid " +
           std::to_string(member.pid) + ")";
  };
  return callbacks;
}

void LongWaits::onWaits(const Lifecycle::Operations& operations) {
  if (!inquiry_) return;
  std::vector<WaitInquiry::Wait> waits;
  size_t messages = 0;
  for (const auto& op : operations) {
    const bool too_many = !isCollective(op->kind()) && ++messages > kMostMessagesAskedOf;
    if (op->done() || too_many) continue;
    if (auto wait = waitOf(op)) waits.push_back(std::move(*wait));
  }
  inquiry_->waits(waits, Clock::now());
}

// nullopt: it does not wait for members, but for an operation before it, or for its bytes.
std::optional<WaitInquiry::Wait> LongWaits::waitOf(const std::shared_ptr<OpState>& op) const {
  WaitInquiry::Wait wait{op};
  if (isCollective(op->kind())) {
    const Collectives::First first = queues_.collectives->first();
    // An engine above may have given it a state of its own, with the same place.
    const bool same_place =
        first.state && op->place() != kNoPlace && first.state->place() == op->place();
    if (first.state != op && !same_place) return std::nullopt;
    wait.root = first.root;
    for (int other = 0; other < size(); ++other) {
      if (other != lifecycle_->identity().rank && !queues_.has_left(other))
        wait.peers.push_back(other);
    }
  } else {
    Messages::Unmatched unmatched = queues_.messages->unmatched(*op);
    wait.peers = std::move(unmatched.peers);
    wait.in_log = !unmatched.of_engine;
  }
  return wait.peers.empty() ? std::nullopt : std::optional(std::move(wait));
}

// Answered immediately, whatever this process's other threads do.
void LongWaits::onQuestion(int rank, uint64_t place) {
  const auto now = Clock::now();
  Clock::time_point& told_at = told_at_[static_cast<size_t>(rank)];
  const bool before = told_at != Clock::time_point::min();
  if (before && now - told_at < kTellEvery) return;
  told_at = now;
  const auto& recorder = lifecycle_->recorder();
  if (!recorder) return;
  const int64_t generation = lifecycle_->identity().generation;
  const std::string payload = encode(reportOf(*recorder, generation, place));
  FrameHeader report;
  report.type = FrameType::kReport;
  report.length = payload.size();
  connections_.along(kControl)[static_cast<size_t>(rank)]->sendText(report, payload);
}

bool LongWaits::onReport(int rank, const std::string& payload) {
  const auto report = decodeReport(payload);
  if (!report) return false;
  if (inquiry_) inquiry_->reported(rank, *report, Clock::now());
  return true;
}

}  // namespace torchft_ext
