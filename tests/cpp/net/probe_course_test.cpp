// What a question to a process's port comes to, in simulated time: no sockets, no waiting.
#include "net/probe_course.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

using std::chrono::seconds;
using End = Dial::End;

class ProbeCourseTest : public ::testing::Test {
 protected:
  ProbeCourseTest() {
    patient.connect = seconds(2);
    patient.answer = seconds(5);
    patient.first_pause = milliseconds(1);
    patient.longest_pause = milliseconds(4);
    patient.breaks_for_gone = 0;
    hasty.connect = seconds(3);
  }
  // How a try ends that takes so long.
  ProbeCourse::Step end(ProbeCourse& course, End how, Duration after = milliseconds(0),
                        RefusalCode code = RefusalCode::kUnknownGeneration) {
    now += after;
    Dial::Result result;
    result.end = how;
    result.code = code;
    const ProbeCourse::Step step = course.onEnd(result, now);
    if (!step.answer) now += step.pause;
    return step;
  }

  Clock::time_point now{seconds(1000)};
  ProbePatience patient;  // as the peer monitor: a connection that breaks counts as none
  ProbePatience hasty;    // as who looks why a connection broke: three that break mean an end
};

TEST_F(ProbeCourseTest, WhatATryTellsIsTheAnswer) {
  const auto answerOf = [&](End how, RefusalCode code = RefusalCode::kUnknownGeneration) {
    ProbeCourse course(hasty, now);
    return end(course, how, {}, code).answer;
  };
  EXPECT_EQ(answerOf(End::kWelcomed), Liveness::kAlive);
  EXPECT_EQ(answerOf(End::kAnswered), Liveness::kAlive);
  EXPECT_EQ(answerOf(End::kAnswered, RefusalCode::kWrongProcess), Liveness::kGone);
  EXPECT_EQ(answerOf(End::kRefused), Liveness::kGone);
  EXPECT_EQ(answerOf(End::kSilent), Liveness::kSilent);
}

TEST_F(ProbeCourseTest, AHostWithoutAConnectionIsUnreachableOnceTheTimeIsOver) {
  ProbeCourse course(patient, now);
  EXPECT_EQ(end(course, End::kUnreachable, milliseconds(1900)).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kUnreachable, milliseconds(97)).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kUnreachable).answer, Liveness::kUnreachable)
      << "after 2 s, with pauses";
}

TEST_F(ProbeCourseTest, AProcessWithoutASocketToAskWithKnowsNothing) {
  ProbeCourse course(patient, now);
  EXPECT_EQ(end(course, End::kNoSocket).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kNoSocket, seconds(2)).answer, Liveness::kUnknown);
}

TEST_F(ProbeCourseTest, WhoAsksInRoundsHearsAtOnceThatThereWasNoSocket) {
  patient.awaits_a_socket = false;
  ProbeCourse course(patient, now);
  EXPECT_EQ(end(course, End::kUnreachable).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kNoSocket).answer, Liveness::kUnknown);
}

TEST_F(ProbeCourseTest, TheThirdConnectionThatBreaksIsAnEndHoweverLateItComes) {
  ProbeCourse course(hasty, now);
  EXPECT_EQ(end(course, End::kBroken, seconds(4)).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kBroken).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kBroken).answer, Liveness::kGone);
}

TEST_F(ProbeCourseTest, ConnectionsThatBreakCountAsNoneForAPatientAsker) {
  ProbeCourse course(patient, now);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(end(course, End::kBroken).answer, std::nullopt) << i;
  EXPECT_EQ(end(course, End::kBroken, seconds(2)).answer, Liveness::kUnreachable);
}

TEST_F(ProbeCourseTest, TheFirstConnectionThatBreaksGivesAPatientAskerItsTimeAgain) {
  ProbeCourse course(patient, now);
  EXPECT_EQ(end(course, End::kBroken, seconds(60)).answer, std::nullopt) << "it was stopped";
  EXPECT_EQ(end(course, End::kBroken, milliseconds(1900)).answer, std::nullopt);
  EXPECT_EQ(end(course, End::kBroken, milliseconds(100)).answer, Liveness::kUnreachable);
}

TEST_F(ProbeCourseTest, ATryHasWhatIsLeftOfTheTimeButALeastTime) {
  ProbeCourse course(patient, now);
  EXPECT_EQ(course.nextBounds(now).connect, seconds(2));
  EXPECT_EQ(course.nextBounds(now + milliseconds(1500)).connect, milliseconds(500));
  EXPECT_EQ(course.nextBounds(now + milliseconds(1999)).connect, ProbeCourse::kLeastTime);
  EXPECT_EQ(course.nextBounds(now + milliseconds(1999)).answer, seconds(5));
}

TEST_F(ProbeCourseTest, AnAnswerWithoutABoundOfItsOwnHasTheTimeOfTheTry) {
  ProbeCourse course(hasty, now);
  EXPECT_EQ(course.nextBounds(now + seconds(1)).answer, seconds(2));
}

TEST_F(ProbeCourseTest, WhatHasNoBoundEndsOnlyByAnAnswer) {
  hasty.connect = Duration(-1);
  ProbeCourse course(hasty, now);
  EXPECT_LT(course.nextBounds(now).connect, Duration(0));
  EXPECT_LT(course.nextBounds(now).answer, Duration(0));
  EXPECT_EQ(end(course, End::kUnreachable, std::chrono::hours(1)).answer, std::nullopt);
}

TEST_F(ProbeCourseTest, PausesDoubleUpToTheLongest) {
  ProbeCourse course(patient, now);
  for (const int pause : {1, 2, 4, 4}) {
    EXPECT_EQ(end(course, End::kUnreachable).pause, milliseconds(pause));
  }
}

}  // namespace
}  // namespace torchft_ext
