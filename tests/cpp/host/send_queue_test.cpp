// Frames through a socket that takes little at a time: every byte once and in order, and no user
// memory after it was let go.
#include "host/send_queue.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <numeric>

#include "base/unique_fd.h"

namespace torchft_ext {
namespace {

using Bytes = std::vector<uint8_t>;

class SendQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> pair{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair.data()), 0);
    writer_ = UniqueFd(pair[0]);
    reader_ = UniqueFd(pair[1]);
    const int small = 4096;
    ASSERT_EQ(::setsockopt(writer_.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)), 0);
  }

  static OutgoingFrame frameOf(const Bytes& payload, uint8_t mark) {
    OutgoingFrame frame;
    frame.header.fill(mark);
    frame.user_payload = payload.data();
    frame.length = payload.size();
    return frame;
  }
  static OutgoingFrame textOf(const std::string& text, uint8_t mark) {
    OutgoingFrame frame;
    frame.header.fill(mark);
    frame.text = text;
    frame.is_text = true;
    frame.length = text.size();
    return frame;
  }
  static Bytes onTheWire(const Bytes& payload, uint8_t mark) {
    Bytes bytes(kFrameHeaderBytes, mark);
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return bytes;
  }
  static Bytes numbered(size_t count) {
    Bytes bytes(count);
    std::iota(bytes.begin(), bytes.end(), uint8_t{0});
    return bytes;
  }

  void readSome() {
    Bytes part(3000);
    const ssize_t count = ::recv(reader_.get(), part.data(), part.size(), 0);
    if (count > 0) received_.insert(received_.end(), part.begin(), part.begin() + count);
  }
  void readAll() {
    for (size_t before = received_.size() + 1; before != received_.size();) {
      before = received_.size();
      readSome();
    }
  }
  void writeAll(size_t at_most) {
    for (int turn = 0; turn < 100000 && !queue_.empty(); ++turn) {
      ASSERT_EQ(queue_.writeTo(writer_.get(), at_most), 0);
      readSome();
    }
    ASSERT_TRUE(queue_.empty());
    readAll();
  }

  UniqueFd writer_;
  UniqueFd reader_;
  SendQueue queue_;
  Bytes received_;
};

TEST_F(SendQueueTest, EveryByteGoesOnceAndInOrderWhateverTheSocketTakes) {
  for (const size_t at_most : {size_t{16}, size_t{100}, size_t{5000}, size_t{1} << 20}) {
    received_.clear();
    const Bytes large = numbered(20'000);
    const Bytes small = numbered(3);
    int sent = 0;
    Bytes expected;
    for (uint8_t mark = 0; mark < 20; ++mark) {
      const Bytes& payload = mark % 3 == 0 ? large : small;
      queue_.push(frameOf(payload, mark));
      const Bytes bytes = onTheWire(payload, mark);
      expected.insert(expected.end(), bytes.begin(), bytes.end());
    }
    OutgoingFrame last = frameOf({}, 99);
    last.sent = [&sent] { ++sent; };
    queue_.push(std::move(last));
    const Bytes bytes = onTheWire({}, 99);
    expected.insert(expected.end(), bytes.begin(), bytes.end());
    const uint64_t before = queue_.bytesWritten();
    writeAll(at_most);
    if (HasFatalFailure()) FAIL() << "at most " << at_most;
    EXPECT_EQ(received_, expected) << "at most " << at_most;
    EXPECT_EQ(queue_.bytesWritten() - before, expected.size());
    ASSERT_TRUE(queue_.hasFinished());
    for (const auto& told : queue_.takeFinished()) told();
    EXPECT_EQ(sent, 1);
  }
}

TEST_F(SendQueueTest, AFrameThatHasBegunGoesOnFromACopyAndTheOthersOfTheUserAreDropped) {
  Bytes begun = numbered(60'000);
  const Bytes waiting = numbered(10);
  const Bytes expected = onTheWire(begun, 1);
  queue_.push(frameOf(begun, 1));
  queue_.push(frameOf(waiting, 2));
  queue_.push(textOf("bye", 3));
  ASSERT_EQ(queue_.writeTo(writer_.get(), 1000), 0);
  ASSERT_TRUE(queue_.isInsideUserPayload());
  EXPECT_FALSE(queue_.ownBegunPayload(59'999));
  ASSERT_TRUE(queue_.ownBegunPayload(60'000));
  queue_.dropUserPayloads();
  begun.assign(begun.size(), 0xff);  // the user's again
  EXPECT_FALSE(queue_.isInsideUserPayload());
  writeAll(5000);
  Bytes all = expected;
  const Bytes text = onTheWire({'b', 'y', 'e'}, 3);
  all.insert(all.end(), text.begin(), text.end());
  EXPECT_EQ(received_, all);
}

TEST_F(SendQueueTest, AFullSocketIsNoErrorAndAClosedOneIs) {
  const Bytes large = numbered(1'000'000);
  queue_.push(frameOf(large, 1));
  for (int turn = 0; turn < 10; ++turn) EXPECT_EQ(queue_.writeTo(writer_.get(), large.size()), 0);
  EXPECT_FALSE(queue_.empty());
  reader_.reset();
  EXPECT_EQ(queue_.writeTo(writer_.get(), large.size()), EPIPE);
  queue_.clear();
  EXPECT_TRUE(queue_.empty());
}

}  // namespace
}  // namespace torchft_ext
