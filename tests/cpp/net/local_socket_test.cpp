// The listener's local socket for processes of its own host, and of its own user alone.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "cpp/support/net_support.h"
#include "net/listener.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

TEST(LocalSocket, AdmitsBesideThePort) {
  Acceptor acceptor({}, newLocalAddress());
  ASSERT_EQ(acceptor.listener->addresses().size(), 2U);
  const SocketAddress local = acceptor.listener->addresses().front();
  EXPECT_TRUE(local.isLocal());
  EXPECT_EQ(acceptor.listener->addresses().back(), acceptor.address());
  acceptor.expect();
  Caller near;
  Caller far;
  near.connect(acceptor, local, 1);
  far.connect(acceptor, 2);
  ASSERT_TRUE(near.result().fd) << near.result().error;
  ASSERT_TRUE(far.result().fd) << far.result().error;
  ASSERT_TRUE(acceptor.waitForAdmitted(2));
  EXPECT_EQ(acceptor.listener->counts().admitted, 2U);
  EXPECT_EQ(acceptor.listener->counts().admitted_locally, 1U);
}

TEST(LocalSocket, RefusesAWrongSecret) {
  Acceptor acceptor({}, newLocalAddress());
  acceptor.expect();
  Hello hello = acceptor.hello();
  hello.proof = GenerationSecret::random().connector;
  RawPeer peer(acceptor.listener->addresses().front());
  peer.say(encodeHello(hello));
  const auto refusal = refusalIn(peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kWrongSecret);
  EXPECT_TRUE(acceptor.admittedRanks().empty());
}

TEST(LocalSocket, IsNotThereWhereTheNameIsTaken) {
  const SocketAddress taken = *newLocalAddress();
  const RawAcceptor squatter(taken);
  Acceptor acceptor({}, taken);
  ASSERT_EQ(acceptor.listener->addresses().size(), 1U);
  acceptor.expect();
  Caller caller;
  caller.connect(acceptor);
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

// A connection whose close takes as long as its owner likes: unsent bytes, and 60 s of lingering.
struct SlowToClose {
  RawAcceptor far;
  UniqueFd near;
  RawPeer other_end;
  SlowToClose() : near(startConnect(far.address(), nullptr)), other_end(far.accept()) {
    const int little = 65536;  // of less the kernel drops what is unsent
    ::setsockopt(near.get(), SOL_SOCKET, SO_SNDBUF, &little, sizeof(little));
    const std::string bytes(1 << 16, 'x');
    pollfd writable{near.get(), POLLOUT, 0};
    while (::poll(&writable, 1, 20) == 1)  // until the far end's buffer is full too
      ::send(near.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    const linger long_time{1, 60};
    ::setsockopt(near.get(), SOL_SOCKET, SO_LINGER, &long_time, sizeof(long_time));
  }
};

// What a process of another user does: connects and sends that descriptor along. Only calls that
// are safe after fork(); the exit status says what failed.
[[noreturn]] void passAsAnotherUser(const SocketAddress& address, int passed) {
  constexpr uid_t kNobody = 65534;
  if (::setuid(kNobody) != 0) ::_exit(1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(fd, address.raw(), address.rawLength()) != 0) ::_exit(2);
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &passed, sizeof(int));
  ::_exit(::sendmsg(fd, &message, MSG_NOSIGNAL) == 1 ? 0 : 3);
}

// The loop is held meanwhile, so that the descriptor is there before the connection is accepted.
void letAnotherUserPass(Acceptor& acceptor, const SocketAddress& local, UniqueFd& passed) {
  onLoop(acceptor.loop, [&] {
    const pid_t child = ::fork();
    if (child == 0) passAsAnotherUser(local, passed.get());
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    passed.reset();  // the kernel holds the last one
  });
}

TEST(LocalSocket, IsNotHeldUpByAnotherUsersDescriptors) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to play another user";
  Acceptor acceptor({}, newLocalAddress());
  acceptor.expect();
  const SocketAddress local = acceptor.listener->addresses().front();
  std::vector<std::unique_ptr<SlowToClose>> weapons;
  for (int i = 0; i < Listener::kMaxTurnedAway + 1; ++i) {
    weapons.push_back(std::make_unique<SlowToClose>());
    letAnotherUserPass(acceptor, local, weapons.back()->near);
    ASSERT_TRUE(acceptor.waitForRefused(static_cast<uint64_t>(i) + 1)) << "the loop stands still";
    if (i > 0) continue;
    Caller own;
    own.connect(acceptor, local, 1);
    EXPECT_TRUE(own.result().fd) << own.result().error;
  }
  onLoop(acceptor.loop, [] {});  // who was turned away is counted before the socket is closed
  RawPeer late_one(startConnect(local, nullptr));
  EXPECT_LT(late_one.fd(), 0) << "after that many the local socket is closed";
  Caller by_tcp;
  by_tcp.connect(acceptor, 2);
  EXPECT_TRUE(by_tcp.result().fd) << by_tcp.result().error;
  weapons.clear();  // resets: the closes end
}

}  // namespace
}  // namespace torchft_ext
