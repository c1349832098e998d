#include "streams.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <semaphore>

#include "base/log.h"

namespace torchft_ext::fuzz {
namespace {

// Handlers' exceptions are caught and logged by the loop.
void abortOnError(LogLevel level, const std::string& /*line*/) {
  if (level == LogLevel::kError) std::abort();
}

// The library's threads block all signals: the sanitizers would not see a fault.
void unblockFaults() {
  sigset_t faults;
  sigemptyset(&faults);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaddset(&faults, signal);
  pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);
}

}  // namespace

void require(bool condition) {
  if (!condition) std::abort();
}

uint8_t Input::byte() {
  const std::string_view one = take(1);
  return one.empty() ? uint8_t{0} : static_cast<uint8_t>(one.front());
}

std::string_view Input::take(size_t at_most) {
  const std::string_view taken = rest_.substr(0, at_most);
  rest_.remove_prefix(taken.size());
  return taken;
}

CutStream::CutStream(std::string_view bytes) {
  Input in(bytes);
  flags = in.byte();
  std::vector<size_t> lengths(in.byte() % (kMostCuts + 1));
  for (size_t& length : lengths) length = in.byte();
  const std::string_view once = in.take(bytes.size());
  std::string all;
  for (int times = 1 + ((flags >> kTimesShift) & 3); times > 0; --times) all += once;
  Input stream(all);
  for (const size_t length : lengths) pieces.emplace_back(stream.take(length));
  pieces.emplace_back(stream.take(all.size()));
  std::erase(pieces, "");
}

std::optional<FrameHeader> headerAt(std::string_view bytes) {
  if (bytes.size() < kFrameHeaderBytes) return std::nullopt;
  FrameBytes raw;
  std::memcpy(raw.data(), bytes.data(), raw.size());
  return decodeHeader(raw, nullptr);
}

InboxOutcome judgeInbox(std::string_view sent, bool hung_up,
                        const std::vector<FrameType>& expected) {
  using State = FrameInbox::State;
  InboxOutcome outcome;
  const State not_yet = hung_up ? State::kClosed : State::kMore;
  if (sent.size() < kFrameHeaderBytes) return {not_yet, {}, {}, sent.size()};
  FrameBytes raw;
  std::memcpy(raw.data(), sent.data(), raw.size());
  outcome.taken = raw.size();
  const auto header = headerAt(sent);
  if (!header) {
    const auto version = versionOf(raw);
    outcome.state = version && *version != kWireVersion ? State::kWrongVersion : State::kBad;
  } else if (std::find(expected.begin(), expected.end(), header->type) == expected.end() ||
             header->length > longestPayload(header->type)) {
    outcome.state = State::kBad;
  } else {
    outcome.header = *header;
    outcome.payload = sent.substr(kFrameHeaderBytes, header->length);
    outcome.taken += outcome.payload.size();
    outcome.state = outcome.payload.size() == header->length ? State::kWhole : not_yet;
  }
  return outcome;
}

std::string readAll(int fd) {
  std::string all;
  std::array<char, 4096> chunk;
  for (;;) {
    const ssize_t got = ::recv(fd, chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got <= 0) return all;
    all.append(chunk.data(), static_cast<size_t>(got));
  }
}

bool isClosed(int fd) {
  char byte = 0;
  const ssize_t got = ::recv(fd, &byte, 1, MSG_DONTWAIT);
  require(got <= 0);
  return got == 0 || errno != EAGAIN;
}

bool wasSent(int fd, std::string_view piece) {
  const ssize_t sent = ::send(fd, piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  require(sent == static_cast<ssize_t>(piece.size()) || (sent < 0 && errno != EAGAIN));
  return sent > 0;
}

EventLoop& loop() {
  static EventLoop the_loop("fuzz");
  [[maybe_unused]] static const bool prepared = [] {
    setLogSink(abortOnError);
    return the_loop.runOnLoop(unblockFaults, Deadline::never());
  }();
  return the_loop;
}

void runInTurns(int pause, const std::function<bool()>& step) {
  std::binary_semaphore done(0);
  int turns_left = 0;
  const std::function<void()> turn = [&] {
    if (turns_left > 0) {
      --turns_left;
    } else if (step()) {
      turns_left = pause;
    } else {
      return done.release();
    }
    loop().post([&turn] { turn(); });
  };
  loop().post([&turn] { turn(); });
  done.acquire();
}

void feed(const CutStream& stream, Reader& reader) {
  UniqueFd far;
  std::string sent;
  size_t next = 0;
  bool begun = false;
  bool hung_up = false;
  runInTurns(0, [&] {
    if (!std::exchange(begun, true)) {
      far = reader.begin();
      return true;
    }
    if (reader.restless()) return true;
    const bool open = reader.check(far.get(), sent, hung_up);
    const bool was_last = next == stream.pieces.size();
    if (hung_up || (was_last && !stream.has(CutStream::kHangsUp))) {
      reader.end();
      return false;
    }
    require(isClosed(far.get()) == !open);
    if (!was_last) {
      require(wasSent(far.get(), stream.pieces[next]) == open);
      if (open) sent += stream.pieces[next];
      ++next;
    }
    const bool is_last = next == stream.pieces.size();
    if (was_last || (is_last && stream.has(CutStream::kHangsUpAtOnce))) {
      far.reset();
      hung_up = true;
    }
    return true;
  });
}

}  // namespace torchft_ext::fuzz
