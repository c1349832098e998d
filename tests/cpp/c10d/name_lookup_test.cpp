#include "c10d/group/name_lookup.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <stdexcept>

#include "base/threads.h"
#include "c10d/work/comm_error.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

std::optional<SocketAddress> somewhere() {
  return SocketAddress::fromNumeric("192.0.2.1", 0);
}

TEST(NameLookup, GivesTheResolversAnswer) {
  EXPECT_EQ(lookUp("a name", kTestPatience, somewhere), somewhere());
  EXPECT_EQ(lookUp("a name", kTestPatience, [] { return std::optional<SocketAddress>(); }),
            std::nullopt);
}

TEST(NameLookup, ThrowsWhatTheLookUpThrows) {
  EXPECT_THROW(
      lookUp("a name", kTestPatience,
             []() -> std::optional<SocketAddress> { throw std::out_of_range("none left"); }),
      std::out_of_range);
}

// A resolver that answers when the test is over.
class SilentResolver : public testing::Test {
 protected:
  ~SilentResolver() override {
    answer_->set_value();
    EXPECT_TRUE(waitFor([] { return threadSnapshot().stuck == 0; }));
  }
  std::optional<SocketAddress> ask(Duration limit) {
    return lookUp("the name 'x'", limit, [waits = answer_->get_future().share()] {
      waits.wait();
      return somewhere();
    });
  }

  CapturedLog log_;

 private:
  const std::shared_ptr<std::promise<void>> answer_ = std::make_shared<std::promise<void>>();
};

TEST_F(SilentResolver, IsGivenUpAtTheLimit) {
  const Deadline late = Deadline::after(kTestPatience);
  try {
    ask(milliseconds(100));
    FAIL() << "it has an answer";
  } catch (const CommError& error) {
    EXPECT_EQ(error.failure().kind, FailureKind::kRendezvous);
    const std::string text = error.failure().describe();
    EXPECT_NE(
        text.find("the look-up of the name 'x' was not answered within 0.1 s; name an interface"),
        std::string::npos)
        << text;
    EXPECT_NE(text.find("Options(interface=...)"), std::string::npos) << text;
  }
  EXPECT_FALSE(late.expired());
}

TEST_F(SilentResolver, IsLeftWhenASignalsHandlerThrows) {
  const ThrowingHook hook;
  EXPECT_THROW(ask(2 * kTestPatience), Interrupted);
}

}  // namespace
}  // namespace torchft_ext
