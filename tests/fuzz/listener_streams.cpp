// The listener, with several callers who say anything in any order, and generations that come and
// go.
//
// The input is a list of steps. Byte: three bits: the caller; two bits: 0 and 1: it says something
// (a length, so many bytes), 2: it hangs up, 3: the caller's lowest bit names a generation, the
// next one says whether the listener is to expect it or to forget it.
#include <array>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "net/handshake.h"
#include "net/listener.h"
#include "paired_sockets.h"
#include "streams.h"

namespace torchft_ext::fuzz {
namespace {

constexpr size_t kCallers = 8;
constexpr int kMostSteps = 64;
constexpr int kRanks = 4;           // a greater one's arrival is refused
constexpr uint8_t kForgets = 0x80;  // a channel at whose arrival the handler forgets the generation
// Real time limits a caller's hello: what a process that was stopped meanwhile does is not judged.
constexpr std::chrono::seconds kJudgedWithin{1};

const auto kSelf = numbered<Incarnation>(4);
GenerationSecret secretOf(const Nonce& nonce) {
  GenerationSecret secret;
  secret.connector.bytes.fill(static_cast<uint8_t>(nonce.bytes.front() + 16));
  secret.acceptor.bytes.fill(static_cast<uint8_t>(nonce.bytes.front() + 32));
  return secret;
}

struct Caller {
  enum class State { kAbsent, kStranger, kParked, kAdmitted, kOver };
  State state = State::kAbsent;
  UniqueFd far;
  std::string sent;
  std::string answers;   // whole frames
  std::string expected;  // of them: a letter for each
  Hello hello;
};

class Siege {
 public:
  explicit Siege(std::string_view bytes) : in_(bytes) {}

  bool step() {
    if (!listener_) {
      open();
      return true;
    }
    const bool judged = Clock::now() - began_ < kJudgedWithin;
    if (judged) check();
    if (judged && !in_.empty() && ++steps_ <= kMostSteps) {
      act();
      return true;
    }
    listener_.reset();
    forgetArrivals();
    return false;
  }

 private:
  using State = Caller::State;

  void open() {
    listener_ = Listener::open(loop(), *SocketAddress::parse("10.0.0.1:1"), {}, nullptr, kSelf);
    require(listener_ != nullptr);
  }

  void act() {
    const uint8_t what = in_.byte();
    Caller& caller = callers_[what % kCallers];
    switch ((what >> 3) & 3) {
      case 2:
        return hangUp(caller);
      case 3:
        return (what & 2) != 0 ? expect(generations_[what & 1]) : forget(generations_[what & 1]);
      default:
        return say(caller, in_.take(in_.byte()));
    }
  }

  void say(Caller& caller, std::string_view bytes) {
    if (caller.state == State::kAbsent) {
      caller.far = arriveAtAcceptor();
      caller.state = State::kStranger;
      ++counts_.accepted;
    }
    if (bytes.empty() || !caller.far) return;
    require(wasSent(caller.far.get(), bytes) == (caller.state != State::kOver));
    caller.sent += bytes;
    if (caller.state == State::kParked) {
      refuse(caller, "");
    } else if (caller.state == State::kStranger) {
      judge(caller, false);
    }
  }

  void hangUp(Caller& caller) {
    if (!caller.far) return;
    caller.answers += readAll(caller.far.get());
    caller.far.reset();
    if (caller.state == State::kParked) refuse(caller, "");
    if (caller.state == State::kStranger) judge(caller, true);
  }

  void judge(Caller& caller, bool hung_up) {
    const InboxOutcome said = judgeInbox(caller.sent, hung_up, {FrameType::kHello});
    if (said.state == FrameInbox::State::kMore) return;
    if (said.state == FrameInbox::State::kWrongVersion) return refuse(caller, "v");
    const auto hello = decodeHello(said.payload);
    if (said.state != FrameInbox::State::kWhole || !hello) return refuse(caller, "");
    caller.hello = *hello;
    const bool to_whoever_listens = hello->to.isZero();
    if (!to_whoever_listens && hello->to != kSelf) return refuse(caller, "p");
    if (expected_.count(hello->nonce) != 0) return admit(caller);
    if (hello->nonce.isZero() || to_whoever_listens) return refuse(caller, "u");
    caller.state = State::kParked;
    parked_.push_back(&caller);
    if (caller.sent.size() > said.taken) refuse(caller, "");  // it may say nothing now
  }

  void admit(Caller& caller) {
    if (caller.hello.proof.bytes != secretOf(caller.hello.nonce).connector.bytes) {
      return refuse(caller, "s");
    }
    if ((caller.hello.channel & kForgets) != 0) expected_.erase(caller.hello.nonce);
    if (caller.hello.rank >= kRanks) return refuse(caller, "wd");
    caller.state = State::kAdmitted;
    caller.expected = "w";
    admitted_.push_back(&caller);
  }

  void refuse(Caller& caller, const char* answers) {
    std::erase(parked_, &caller);
    caller.state = State::kOver;
    caller.expected = answers;
    ++counts_.refused;
  }

  void expect(const Nonce& nonce) {
    expected_.insert(nonce);
    const std::vector<Caller*> waiting = std::exchange(parked_, {});
    std::vector<Caller*> parked_again;
    for (Caller* caller : waiting) {
      if (caller->hello.nonce != nonce) {
        parked_.push_back(caller);
      } else if (expected_.count(nonce) == 0) {  // an arrival's handler has forgotten it
        parked_again.push_back(caller);
      } else {
        admit(*caller);
      }
    }
    parked_.insert(parked_.end(), parked_again.begin(), parked_again.end());
    listener_->expect(nonce, secretOf(nonce), [this, nonce](Arrival& arrival) {
      if ((arrival.channel & kForgets) != 0) listener_->forget(nonce);
      if (arrival.rank >= kRanks) return false;
      arrivals_.push_back(std::move(arrival));
      return true;
    });
  }

  void forget(const Nonce& nonce) {
    expected_.erase(nonce);
    listener_->forget(nonce);
  }

  void check() {
    for (Caller& caller : callers_) {
      if (caller.far) checkAnswers(caller);
    }
    require(arrivals_.size() == admitted_.size());
    beyond_.resize(arrivals_.size());
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      const Arrival& arrival = arrivals_[i];
      const Hello& hello = admitted_[i]->hello;
      require(arrival.rank == hello.rank && arrival.channel == hello.channel);
      require(arrival.from == hello.from);
      beyond_[i] += readAll(arrival.fd.get());
      require(beyond_[i] == admitted_[i]->sent.substr(encodeHello(hello).size()));
    }
    const Listener::Counts counts = listener_->counts();
    require(counts.accepted == counts_.accepted && counts.refused == counts_.refused);
    require(counts.admitted == admitted_.size() && counts.parked == parked_.size());
  }

  static void checkAnswers(Caller& caller) {
    caller.answers += readAll(caller.far.get());
    std::string letters;
    for (std::string_view rest = caller.answers; !rest.empty();) {
      const auto header = headerAt(rest);
      require(header && rest.size() >= kFrameHeaderBytes + header->length);
      letters += letterOf(*header, rest.substr(kFrameHeaderBytes, header->length), caller.hello);
      rest.remove_prefix(kFrameHeaderBytes + header->length);
    }
    require(letters == caller.expected);
    require(isClosed(caller.far.get()) == (caller.state == State::kOver));
  }

  static char letterOf(const FrameHeader& header, std::string_view payload, const Hello& hello) {
    if (header.type == FrameType::kWelcome) {
      const auto welcome = decodeWelcome(payload);
      require(welcome && welcome->from == kSelf);
      require(welcome->proof == secretOf(hello.nonce).acceptor);
      return 'w';
    }
    require(header.type == FrameType::kRefused);
    const auto refusal = decodeRefusal(payload);
    require(refusal.has_value());
    switch (refusal->code) {
      case RefusalCode::kUnknownGeneration:
        return 'u';
      case RefusalCode::kWrongSecret:
        return 's';
      case RefusalCode::kWrongProcess:
        return 'p';
      case RefusalCode::kDuplicate:
        return 'd';
      case RefusalCode::kWrongVersion:
        return 'v';
    }
    return '?';
  }

  const std::array<Nonce, 2> generations_{numbered<Nonce>(1), numbered<Nonce>(2)};
  Input in_;
  const Clock::time_point began_ = Clock::now();
  int steps_ = 0;
  std::shared_ptr<Listener> listener_;
  std::array<Caller, kCallers> callers_;
  std::vector<Arrival> arrivals_;
  std::vector<std::string> beyond_;  // what came after their hellos

  // What must have happened.
  std::set<Nonce> expected_;
  std::vector<Caller*> parked_;    // in order
  std::vector<Caller*> admitted_;  // in order
  Listener::Counts counts_;
};

}  // namespace

void listener(std::string_view bytes) {
  Siege siege(bytes);
  // A caller that is parked and has said too much is noticed in the turn after.
  runInTurns(1, [&siege] { return siege.step(); });
}

}  // namespace torchft_ext::fuzz
