// Which streams communicators get.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cpp/nccl/nccl_cluster.h"
#include "device/event_pool.h"
#include "device/on_device.h"
#include "nccl/stream_pool.h"
#include "sim_stream.h"

namespace torchft_ext {
namespace {

std::shared_ptr<const c10::Stream> take() {
  return takeStream(*sim::platform()->cuda, deviceOf(0), false);
}

TEST(NcclStreams, AStreamThatWasGivenBackIsTakenFirst) {
  const c10::Stream first = *take();
  EXPECT_EQ(*take(), first);
  const auto held = take();
  EXPECT_NE(*take(), *held);
}

TEST(NcclStreams, OneThatIsBeingCapturedIsLeftToItsGraph) {
  const c10::Stream captured = *take();
  sim::SimStream& stream = sim::streamOf(captured);
  const auto graph = stream.beginCapture();
  for (int i = 0; i < 40; ++i) EXPECT_NE(*take(), captured);
  EXPECT_TRUE(stream.endCapture());
}

// In a process of its own, whose exit() ends the simulated device as it unloads a real runtime.
void exitWithAnEvent(bool of_the_pool) {
  struct Last {
    std::shared_ptr<EventPool> pool = std::make_shared<EventPool>();
    std::shared_ptr<c10::Event> event;
  };
  static Last last;  // goes after the device, which is used later
  const auto stream = take();
  const OnDevice on_device(deviceOf(0));
  last.event =
      of_the_pool ? last.pool->take(deviceOf(0), false) : EventPool::fresh(deviceOf(0), false);
  last.event->record(*stream);
  std::exit(0);
}

TEST(NcclStreamsDeathTest, AnEventThatOutlivesItsDeviceAtExitEndsNothing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exitWithAnEvent(true), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exitWithAnEvent(false), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace torchft_ext
