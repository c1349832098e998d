// A child's end of the socket to its parent: whole frames or none, and an end with the parent's.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <future>

#include "child/channel.h"
#include "comm/callbacks.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext::child {
namespace {

constexpr int kBufferBytes = 4096;  // the kernel makes some more of it
constexpr size_t kMuch = 1U << 20U;

struct Ends {
  UniqueFd near;
  UniqueFd far;
};

Ends pairOf(int type) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends.data()), 0);
  EXPECT_EQ(::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof(kBufferBytes)), 0);
  const timeval patience{10, 0};
  EXPECT_EQ(::setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Up to so many bytes, as they come; fewer: the other end is closed, or sends no more.
std::string readUpTo(const UniqueFd& from, size_t count) {
  std::string bytes(count, '\0');
  size_t got = 0;
  while (got < count) {
    const ssize_t part = ::recv(from.get(), bytes.data() + got, count - got, 0);
    if (part <= 0) break;
    got += static_cast<size_t>(part);
  }
  bytes.resize(got);
  return bytes;
}

// That nothing holds it any more: neither a callback that sends what is left, nor one that is yet
// to run.
bool isLetGo(std::shared_ptr<Channel> channel) {
  const std::weak_ptr<Channel> watched = channel;
  channel.reset();
  return waitFor([&] { return watched.expired(); });
}

// While it lives, all callback threads that there are do something else.
class AllBusy {
 public:
  AllBusy() {
    for (size_t count = 0; count < callbackThreads().threads; ++count) {
      EXPECT_TRUE(runOnCallbackThread([this, over = over_] {
        ++busy_;
        const CallbackWaits others_may_run;
        over.wait();
      }));
      EXPECT_TRUE(waitFor([&] { return busy_ == count + 1; }));
    }
  }
  ~AllBusy() { end_.set_value(); }
  AllBusy(const AllBusy&) = delete;
  AllBusy& operator=(const AllBusy&) = delete;

 private:
  std::promise<void> end_;
  const std::shared_future<void> over_ = end_.get_future().share();
  std::atomic<size_t> busy_{0};
};

// While it lives no thread can start: there is no address space for its stack.
class NoThreads {
 public:
  NoThreads() {
    EXPECT_EQ(::pthread_getattr_default_np(&before_), 0);
    pthread_attr_t huge;
    EXPECT_EQ(::pthread_attr_init(&huge), 0);
    EXPECT_EQ(::pthread_attr_setstacksize(&huge, size_t{1} << 47U), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&huge), 0);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    EXPECT_EQ(::pthread_setattr_default_np(&before_), 0);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

// A process that does nothing, in a parent's place.
class Idle {
 public:
  Idle() : pid_(::fork()) {
    if (pid_ == 0) {
      while (true) ::pause();
    }
  }
  ~Idle() { end(); }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

std::shared_ptr<Channel> channelTo(UniqueFd socket) {
  return std::make_shared<Channel>(std::move(socket), ::getppid());
}

TEST(ChildChannel, SendsWhatTheParentDidNotTakeAtOnceBeforeWhatCameLater) {
  Ends ends = pairOf(SOCK_STREAM);
  auto channel = channelTo(std::move(ends.near));
  const std::string large(kMuch, 'a');
  channel->send(large);
  channel->send("later");
  EXPECT_EQ(readUpTo(ends.far, kMuch + 5), large + "later");
  EXPECT_TRUE(isLetGo(std::move(channel)));
}

// Of packets one may be refused while the next would be taken.
TEST(ChildChannel, SendsNothingAfterAFrameThatWasLost) {
  Ends ends = pairOf(SOCK_SEQPACKET);
  auto channel = channelTo(std::move(ends.near));
  channel->send("first");
  channel->send(std::string(kMuch, 'x'));
  channel->send("second");
  ASSERT_EQ(readUpTo(ends.far, 100), "first");
  EXPECT_FALSE(channel->receive()) << "whoever waits for the parent is not told";
  EXPECT_TRUE(isLetGo(std::move(channel)));
}

TEST(ChildChannel, DropsWhatIsLeftOnceTheParentHasClosedItsEnd) {
  Ends ends = pairOf(SOCK_STREAM);
  auto channel = channelTo(std::move(ends.near));
  channel->send(std::string(kMuch, 'x'));
  ends.far.reset();
  channel->send("later");
  EXPECT_FALSE(channel->receive());
  EXPECT_TRUE(isLetGo(std::move(channel)));
}

TEST(ChildChannel, SendsWithALaterFrameWhatNoThreadCouldBeStartedFor) {
  Ends ends = pairOf(SOCK_STREAM);
  auto channel = channelTo(std::move(ends.near));
  const std::string large(kMuch, 'a');
  const AllBusy nobody_takes_it;
  {
    const NoThreads none;
    channel->send(large);
  }
  channel->send("later");
  EXPECT_EQ(readUpTo(ends.far, kMuch + 5), large + "later");
  EXPECT_TRUE(isLetGo(std::move(channel)));
}

// A fork of the parent may hold the far end open, and reads nothing.
TEST(ChildChannel, WaitsNoLongerForWhoReadsNothingOnceTheParentHasEnded) {
  Idle parent;
  if (!processDescriptor(parent.pid())) GTEST_SKIP() << "this kernel has no pidfd_open()";
  Ends ends = pairOf(SOCK_STREAM);
  auto channel = std::make_shared<Channel>(std::move(ends.near), parent.pid());
  channel->send(std::string(kMuch, 'x'));
  const std::weak_ptr<Channel> watched = channel;
  channel.reset();
  EXPECT_FALSE(watched.expired()) << "nobody waits to send the rest";
  parent.end();
  EXPECT_TRUE(waitFor([&] { return watched.expired(); }));
}

}  // namespace
}  // namespace torchft_ext::child
