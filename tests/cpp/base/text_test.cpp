// Texts of a limited length.
#include "base/text.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

TEST(CutText, ShortTextsStayWhole) {
  EXPECT_EQ(cutText("", 0), "");
  EXPECT_EQ(cutText("a\xC3\xA4", 3), "a\xC3\xA4");
}

TEST(CutText, NoPartOfACharacterStays) {
  EXPECT_EQ(cutText("a\xC3\xA4", 2), "a");      // 2 bytes
  EXPECT_EQ(cutText("a\xE2\x82\xAC", 3), "a");  // 3 bytes
  EXPECT_EQ(cutText("a\xF0\x9F\x98\x80"
                    "b",
                    4),
            "a");  // 4 bytes
  EXPECT_EQ(cutText("a\xF0\x9F\x98\x80"
                    "b",
                    5),
            "a\xF0\x9F\x98\x80");
  EXPECT_EQ(cutText("\xC3\xA4", 1), "");
}

TEST(CutText, BytesThatAreNoUtf8AreCutAnywhere) {
  EXPECT_EQ(cutText("\x80\x80\x80\x80\x80\x80", 5), "\x80\x80\x80\x80\x80");
}

}  // namespace
}  // namespace torchft_ext
