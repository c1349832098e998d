// Both sides of the handshake, against a peer that may say anything, in pieces.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "net/connector.h"
#include "net/dial.h"
#include "net/handshake.h"
#include "paired_sockets.h"
#include "streams.h"

namespace torchft_ext::fuzz {
namespace {

Hello ourHello() {
  Hello hello;
  hello.nonce = numbered<Nonce>(1);
  hello.proof.bytes.fill(2);
  hello.from = numbered<Incarnation>(3);
  hello.to = numbered<Incarnation>(4);
  hello.rank = 1;
  return hello;
}

Welcome expectedWelcome() {
  Welcome welcome;
  welcome.proof.bytes.fill(5);
  welcome.from = numbered<Incarnation>(4);
  return welcome;
}

// ---------------------------------------------------------------- one dial

struct DialOutcome {
  Dial::End end = Dial::End::kBroken;
  RefusalCode code = RefusalCode::kUnknownGeneration;
  size_t taken = 0;
};

DialOutcome judgeAnswer(FrameType type, std::string_view payload) {
  const size_t taken = kFrameHeaderBytes + payload.size();
  if (type == FrameType::kRefused) {
    if (const auto refusal = decodeRefusal(payload)) {
      return {Dial::End::kAnswered, refusal->code, taken};
    }
  } else if (type == FrameType::kWelcome) {
    const auto welcome = decodeWelcome(payload);
    if (!welcome) return {};
    if (welcome->from != expectedWelcome().from) {
      return {Dial::End::kAnswered, RefusalCode::kWrongProcess, taken};
    }
    if (welcome->proof.bytes != expectedWelcome().proof.bytes) {
      return {Dial::End::kAnswered, RefusalCode::kWrongSecret, taken};
    }
    return {Dial::End::kWelcomed, RefusalCode::kUnknownGeneration, taken};
  }
  return {};
}

// nullopt: goes on waiting.
std::optional<DialOutcome> judgeDial(std::string_view sent, bool hung_up) {
  const auto not_yet = hung_up ? std::optional(DialOutcome()) : std::nullopt;
  if (sent.size() < kFrameHeaderBytes) return not_yet;
  const auto header = headerAt(sent);
  if (!header || header->length > 1024) return DialOutcome();
  const std::string_view payload = sent.substr(kFrameHeaderBytes, header->length);
  if (payload.size() < header->length) return not_yet;
  return judgeAnswer(header->type, payload);
}

class DialReader : public Reader {
 public:
  explicit DialReader(bool destroys) : destroys_(destroys) {}

  UniqueFd begin() override {
    dial_ = std::make_unique<Dial>(loop(), *SocketAddress::parse("10.0.0.1:1"), ourHello(),
                                   expectedWelcome(), Deadline::never(), Duration(-1),
                                   [this](Dial::Result result) {
                                     require(!result_);
                                     result_ = std::move(result);
                                     if (destroys_) dial_.reset();
                                   });
    std::vector<Dialled> dialled = takeDialled();
    require(dialled.size() == 1);
    return std::move(dialled.front().far);
  }

  bool check(int far, std::string_view sent, bool hung_up) override {
    if (!hung_up) hello_ += readAll(far);
    require(hello_ == encodeHello(ourHello()));
    if (!expected_) expected_ = judgeDial(sent, hung_up);
    require(result_.has_value() == expected_.has_value());
    if (!result_) return true;
    const bool welcomed = result_->end == Dial::End::kWelcomed;
    require(result_->end == expected_->end && result_->code == expected_->code);
    require(static_cast<bool>(result_->fd) == welcomed);
    if (welcomed) {
      beyond_ += readAll(result_->fd.get());
      require(beyond_ == sent.substr(expected_->taken));
    }
    return welcomed;
  }

  void end() override { dial_.reset(); }

 private:
  const bool destroys_;
  std::unique_ptr<Dial> dial_;
  std::string hello_;
  std::optional<DialOutcome> expected_;
  std::optional<Dial::Result> result_;
  std::string beyond_;  // what came after the answer
};

// ---------------------------------------------------------------- a connector's attempts

struct Attempt {
  UniqueFd far;
  size_t address = 0;
  std::string hello;
  std::string sent;
  bool hung_up = false;
};

enum class AttemptEnd { kNone, kAgain, kNever, kSuccess };

AttemptEnd judgeAttempt(std::string_view sent, bool hung_up, size_t* taken) {
  using State = FrameInbox::State;
  const InboxOutcome said = judgeInbox(sent, hung_up, {FrameType::kWelcome, FrameType::kRefused});
  *taken = said.taken;
  if (said.state == State::kMore) return AttemptEnd::kNone;
  if (said.state == State::kClosed) return AttemptEnd::kAgain;
  if (said.state != State::kWhole) return AttemptEnd::kNever;
  if (said.header.type == FrameType::kRefused) {
    const auto refusal = decodeRefusal(said.payload);
    const bool again = refusal && refusal->code == RefusalCode::kUnknownGeneration;
    return again ? AttemptEnd::kAgain : AttemptEnd::kNever;
  }
  const auto welcome = decodeWelcome(said.payload);
  const bool right = welcome && welcome->proof.bytes == expectedWelcome().proof.bytes &&
                     welcome->from == expectedWelcome().from;
  return right ? AttemptEnd::kSuccess : AttemptEnd::kNever;
}

// The input: a length and so many bytes, for the attempt under way; 255: hang up. Ends where the
// connector pauses before it tries again.
class ConnectorRun {
 public:
  explicit ConnectorRun(std::string_view bytes) : in_(bytes) {}

  bool step() {
    if (!std::exchange(begun_, true)) {
      begin();
      return true;
    }
    if (ended_) {
      require(takeDialled().empty());
      return false;
    }
    if (attempt_) {
      if (!attempt_->hung_up) attempt_->hello += readAll(attempt_->far.get());
      require(attempt_->hello == encodeHello(ourHello()));
      if (!judge()) return in_.empty() ? finish() : sendMore();
    }
    takeAttempt();
    if (attempt_) return true;
    require(!must_go_on_ || result_);
    return finish();
  }

 private:
  void begin() {
    connector_ = std::make_unique<Connector>(loop(), addresses_, ourHello(), expectedWelcome(),
                                             Deadline::never(), [this](Connector::Result result) {
                                               require(!result_ && connector_);
                                               result_ = std::move(result);
                                               connector_.reset();
                                             });
  }

  void takeAttempt() {
    for (Dialled& dialled : takeDialled()) {
      require(!attempt_ && !result_);
      const auto found = std::find(addresses_.begin(), addresses_.end(), dialled.to);
      require(found != addresses_.end());
      const auto address = static_cast<size_t>(found - addresses_.begin());
      require(!given_up_[address]);
      attempt_.emplace();
      attempt_->far = std::move(dialled.far);
      attempt_->address = address;
    }
  }

  // True: the attempt is over.
  bool judge() {
    size_t taken = 0;
    const AttemptEnd end = judgeAttempt(attempt_->sent, attempt_->hung_up, &taken);
    if (end == AttemptEnd::kNone) {
      require(!result_ && !isClosed(attempt_->far.get()));
      return false;
    }
    if (end == AttemptEnd::kNever) given_up_[attempt_->address] = true;
    const bool none_left = std::count(given_up_.begin(), given_up_.end(), false) == 0;
    require(result_.has_value() == (end == AttemptEnd::kSuccess || none_left));
    if (result_) {
      require(static_cast<bool>(result_->fd) == result_->error.empty());
      require(static_cast<bool>(result_->fd) == (end == AttemptEnd::kSuccess));
      if (result_->fd) require(readAll(result_->fd.get()) == attempt_->sent.substr(taken));
    } else {
      require(attempt_->hung_up || isClosed(attempt_->far.get()));
    }
    must_go_on_ = end == AttemptEnd::kNever;
    attempt_.reset();
    return true;
  }

  bool sendMore() {
    const uint8_t length = in_.byte();
    if (length == 255) {
      attempt_->far.reset();
      attempt_->hung_up = true;
      return true;
    }
    const std::string_view piece = in_.take(length);
    require(piece.empty() || wasSent(attempt_->far.get(), piece));
    attempt_->sent += piece;
    return true;
  }

  bool finish() {
    connector_.reset();
    attempt_.reset();
    ended_ = true;
    return true;  // a few turns, in which nothing may come any more
  }

  Input in_;
  const std::vector<SocketAddress> addresses_{*SocketAddress::parse("10.0.0.1:1"),
                                              *SocketAddress::parse("10.0.0.2:2"),
                                              *SocketAddress::parse("[::1]:3")};
  std::array<bool, 3> given_up_{};
  bool begun_ = false;
  bool ended_ = false;
  bool must_go_on_ = false;
  std::unique_ptr<Connector> connector_;
  std::optional<Attempt> attempt_;
  std::optional<Connector::Result> result_;
};

}  // namespace

void dial(std::string_view bytes) {
  const CutStream stream(bytes);
  DialReader reader(stream.has(CutStream::kDestroys));
  feed(stream, reader);
}

void connector(std::string_view bytes) {
  ConnectorRun run(bytes);
  // The next attempt begins with a timer, and connects in the turn after.
  runInTurns(3, [&run] { return run.step(); });
}

}  // namespace torchft_ext::fuzz
