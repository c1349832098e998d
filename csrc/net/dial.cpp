#include "net/dial.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kLongestAnswer = 1024;
constexpr Duration kUsualLateness = std::chrono::milliseconds(20);

FrameBytes headerOf(const std::string& bytes) {
  FrameBytes header{};
  std::copy_n(bytes.begin(), header.size(), header.begin());
  return header;
}

}  // namespace

Dial::End Dial::endOfError(int error) {
  switch (error) {
    case ECONNREFUSED:
      return Dial::End::kRefused;
    case ECONNRESET:
    case EPIPE:
      return Dial::End::kBroken;
    case EAGAIN:
    case ENOBUFS:
    case ENOMEM:
    case EADDRNOTAVAIL:  // no port is left
      return Dial::End::kNoSocket;
    default:
      return Dial::End::kUnreachable;
  }
}

Dial::Dial(EventLoop& loop, const SocketAddress& address, const Hello& hello,
           const Welcome& expected, Deadline connect_by, Duration answer_within, Callback callback)
    : loop_(loop),
      hello_(encodeHello(hello)),
      expected_(expected),
      answer_within_(answer_within),
      callback_(std::move(callback)) {
  std::string error;
  End end = End::kNoSocket;
  try {
    int code = 0;
    fd_ = startConnect(address, &error, &code);
    end = endOfError(code);
    if (fd_) loop_.watch(fd_.get(), EPOLLOUT, [this](uint32_t) { onEvent(); });
  } catch (const std::system_error& refused) {
    fd_.reset();
    error = refused.what();
  }
  if (!fd_) {
    timer_ = loop_.runAt(Clock::now(), [this, end, error] { finish(end, error); });
  } else {
    arm(connect_by);
  }
}

Dial::~Dial() {
  loop_.cancel(timer_);
  if (fd_) loop_.unwatch(fd_.get());
}

void Dial::arm(Deadline due) {
  if (due.isNever()) return;
  due_ = due;
  timer_ = loop_.runAt(due.at(), [this] { onTime(); });
}

void Dial::onTime() {
  timer_ = 0;
  const Duration late = Clock::now() - due_.at();
  if (late > kUsualLateness && !std::exchange(credited_, true)) return arm(Deadline::after(late));
  if (connected_) {
    finish(End::kSilent, "connected, but it did not answer");
  } else {
    finish(End::kUnreachable, "no connection");
  }
}

void Dial::onEvent() {
  if (connected_) {
    readAnswer();
  } else {
    onConnected();
  }
}

void Dial::onConnected() {
  const int error = pendingSocketError(fd_.get());
  if (error != 0) return finish(endOfError(error), std::generic_category().message(error));
  connected_ = true;
  // A fresh connection's buffer takes a hello whole; if it does not, the connection is of no use.
  const ssize_t sent = ::send(fd_.get(), hello_.data(), hello_.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(hello_.size())) {
    return finish(End::kBroken, "the connection took no hello");
  }
  loop_.modify(fd_.get(), EPOLLIN);
  loop_.cancel(std::exchange(timer_, 0));
  arm(Deadline::after(answer_within_));
}

bool Dial::readUpTo(size_t size) {
  while (answer_.size() < size) {
    const size_t had = answer_.size();
    answer_.resize(size);
    const ssize_t got = ::recv(fd_.get(), answer_.data() + had, size - had, 0);
    const int error = got < 0 ? errno : 0;
    answer_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got > 0) continue;
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return false;
    finish(End::kBroken,
           got == 0 ? "closed without an answer" : std::generic_category().message(error));
    return false;
  }
  return true;
}

void Dial::readAnswer() {
  if (!readUpTo(kFrameHeaderBytes)) return;
  std::string why;
  const std::optional<FrameHeader> header = decodeHeader(headerOf(answer_), &why);
  if (!header) return finish(End::kBroken, why);
  if (header->length > kLongestAnswer) return finish(End::kBroken, "its answer is too long");
  if (!readUpTo(kFrameHeaderBytes + header->length)) return;
  onAnswer(header->type, std::string_view(answer_).substr(kFrameHeaderBytes));
}

void Dial::onAnswer(FrameType type, std::string_view payload) {
  if (type == FrameType::kRefused) {
    const std::optional<Refusal> refusal = decodeRefusal(payload);
    if (!refusal) return finish(End::kBroken, "malformed refusal");
    return finish(End::kAnswered, refusal->reason, refusal->code);
  }
  if (type != FrameType::kWelcome) return finish(End::kBroken, "neither welcome nor refusal");
  const std::optional<Welcome> welcome = decodeWelcome(payload);
  if (!welcome) return finish(End::kBroken, "malformed welcome");
  if (!expected_.from.isZero() && welcome->from != expected_.from) {
    return finish(End::kAnswered, "another process answered", RefusalCode::kWrongProcess);
  }
  if (!equalInConstantTime(welcome->proof.bytes, expected_.proof.bytes)) {
    return finish(End::kAnswered, "it does not know the generation's secret",
                  RefusalCode::kWrongSecret);
  }
  finish(End::kWelcomed, "");
}

void Dial::finish(End end, std::string detail, RefusalCode code) {
  loop_.cancel(std::exchange(timer_, 0));
  if (fd_) loop_.unwatch(fd_.get());
  Result result;
  result.end = end;
  result.code = code;
  result.detail = std::move(detail);
  if (end == End::kWelcomed) result.fd = std::move(fd_);
  fd_.reset();
  // The callback may destroy this object: nothing is touched after it.
  const Callback callback = std::exchange(callback_, nullptr);
  if (callback) callback(std::move(result));
}

std::optional<Liveness> livenessShownBy(const Dial::Result& result) {
  switch (result.end) {
    case Dial::End::kWelcomed:
      return Liveness::kAlive;
    case Dial::End::kAnswered:
      return result.code == RefusalCode::kWrongProcess ? Liveness::kGone : Liveness::kAlive;
    case Dial::End::kRefused:
      return Liveness::kGone;
    case Dial::End::kSilent:
      return Liveness::kSilent;
    case Dial::End::kUnreachable:
    case Dial::End::kBroken:
    case Dial::End::kNoSocket:
      break;
  }
  return std::nullopt;
}

Hello lifeQuestion(const Incarnation& self, const Incarnation& to, uint8_t channel) {
  Hello question;  // with no proof
  question.nonce = kProbeNonce;
  question.from = self;
  question.to = to;
  question.rank = 0;
  question.channel = channel;
  return question;
}

}  // namespace torchft_ext
