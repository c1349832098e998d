// C++ and Python processes in one job, and in one group: mixed/.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpp/libtorch/store_server.h"
#include "cpp/support/processes.h"

#ifdef TFT_PYTHON

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLimit{180};
enum class Language { kCpp, kPython };

void start(Processes& processes, Language language, std::vector<std::string> words) {
  const std::vector<std::string> program = language == Language::kCpp
                                               ? std::vector<std::string>{TFT_MIXED}
                                               : std::vector<std::string>{TFT_PYTHON, TFT_MIXED_PY};
  words.insert(words.begin(), program.begin(), program.end());
  processes.start(words);
}

// Founders of both languages: one is killed, one leaves; newcomers of both come.
void runJob(Language dies, Language leaves) {
  const Meeting meeting;
  Processes survivors;
  Processes victim;
  const std::string port = meeting.port();
  start(survivors, Language::kCpp, {"job", port, "0", "4", "2"});
  start(survivors, Language::kPython, {"job", port, "1", "4", "2"});
  start(victim, dies, {"job", port, "2", "4", "2", "die", "20"});
  start(survivors, leaves, {"job", port, "3", "4", "2", "leave", "40"});
  start(survivors, Language::kPython, {"job", port, "4", "4", "2"});
  start(survivors, Language::kCpp, {"job", port, "5", "4", "2"});
  EXPECT_TRUE(survivors.endWell(Deadline::after(kLimit)));
}

TEST(MixedLanguages, AJobOfBothSurvivesADeathAndTakesNewcomersIn) {
  runJob(/*dies=*/Language::kCpp, /*leaves=*/Language::kPython);
}

TEST(MixedLanguages, TheSameWithTheLanguagesTheOtherWayRound) {
  runJob(/*dies=*/Language::kPython, /*leaves=*/Language::kCpp);
}

TEST(MixedLanguages, AFrozenMemberHoldsNobodyUpForLongerThanTheJobsLimit) {
  const Meeting meeting;
  Processes survivors;
  Processes victim;
  const std::string port = meeting.port();
  start(survivors, Language::kCpp, {"job", port, "0", "3", "0"});
  start(survivors, Language::kPython, {"job", port, "1", "3", "0"});
  start(victim, Language::kCpp, {"job", port, "2", "3", "0", "freeze", "20"});
  EXPECT_TRUE(survivors.endWell(Deadline::after(kLimit)));
}

void runTwo(const std::vector<std::string>& cpp, const std::vector<std::string>& python) {
  Processes both;
  start(both, Language::kPython, python);
  start(both, Language::kCpp, cpp);
  EXPECT_TRUE(both.endWell(Deadline::after(kLimit)));
}

TEST(MixedLanguages, GroupsOfOtherNamesEndInAnErrorThatHasBoth) {
  const Meeting meeting;
  const std::vector<std::string> words{"names", meeting.port(), "model"};
  runTwo(words, words);
}

TEST(MixedLanguages, FirstOperationsThatDifferEndInAnErrorThatNamesThem) {
  const Meeting meeting;
  const std::vector<std::string> words{"first", meeting.port()};
  runTwo(words, words);
}

TEST(MixedLanguages, ACppAndAPythonRankAreInOneGroup) {
  const Meeting meeting;
  runTwo({"group", meeting.port(), "0"}, {"group", meeting.port(), "1"});
}

}  // namespace
}  // namespace torchft_ext

#endif
