// Which streams communicators get.
#include <gtest/gtest.h>

#include "cpp/nccl/nccl_cluster.h"
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

}  // namespace
}  // namespace torchft_ext
