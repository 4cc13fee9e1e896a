/* Lines on stderr, of the levels that the environment asks for. */
#define _GNU_SOURCE
#include "common/log.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"

#define ROOM 4096

/* Says one line of each level with SMP_LOG as given; what came on stderr is in `out`.
 */
static void
say(const char *asked, const char *text, char out[ROOM])
{
    int     ends[2];
    int     before = dup(STDERR_FILENO);
    ssize_t got;

    memset(out, 0, ROOM);
    if (before < 0 || pipe(ends) != 0) {
        return;
    }
    if (asked != NULL) {
        setenv("SMP_LOG", asked, 1);
    } else {
        unsetenv("SMP_LOG");
    }
    dup2(ends[1], STDERR_FILENO);
    smp_log_init();
    smp_log(SMP_LOG_WARN, "grave %s", text);
    smp_log(SMP_LOG_INFO, "decided %s", text);
    smp_log(SMP_LOG_DEBUG, "one of many %s", text);
    dup2(before, STDERR_FILENO);
    close(before);
    close(ends[1]);
    got = read(ends[0], out, ROOM - 1);
    out[got > 0 ? got : 0] = '\0';
    close(ends[0]);
}

static int
lines(const char *text)
{
    int n = 0;

    for (; *text != '\0'; text++) {
        n += *text == '\n';
    }
    return n;
}

TEST(a_level_has_the_graver_ones)
{
    static const char *const asked[] = {NULL, "", "off", "warn", "info", "debug"};
    static const int         want[] = {0, 0, 0, 1, 2, 3};
    char                     out[ROOM];

    for (size_t i = 0; i < COUNT_OF(want); i++) {
        say(asked[i], "thing", out);
        CHECK(lines(out) == want[i]);
    }
    CHECK_HAS(out, " debug: one of many thing\n");
}

TEST(a_line_has_the_time_and_the_rank)
{
    char out[ROOM];
    int  day[4];

    smp_log_rank(17);
    say("warn", "thing", out);
    CHECK(sscanf(out, "smp %2d:%2d:%2d.%3d rank 17 warn: grave thing", &day[0], &day[1],
                 &day[2], &day[3]) == 4);
    smp_log_rank(-1);
    say("warn", "thing", out);
    CHECK_HAS(out, " process ");
}

TEST(what_is_no_level_is_told)
{
    char out[ROOM];

    say("loud", "thing", out);
    CHECK_HAS(out, "SMP_LOG=loud: must be off, warn, info or debug\n");
    CHECK(lines(out) == 2); /* as with warn */
}

TEST(a_long_text_is_cut_and_is_still_a_line)
{
    char text[2 * ROOM];
    char out[ROOM];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    say("warn", text, out);
    CHECK(strlen(out) == 1000 && out[999] == '\n');
}

TEST(the_first_warning_waits_for_the_script)
{
    char text[SMP_WARNING_BYTES];
    char large[2 * SMP_WARNING_BYTES];

    CHECK(!smp_warning_take(text));
    smp_warn("grave %d", 1);
    smp_warn("grave %d", 2);
    CHECK(smp_warning_take(text) && strcmp(text, "grave 1") == 0);
    CHECK(!smp_warning_take(text));
    memset(large, 'x', sizeof(large) - 1);
    large[sizeof(large) - 1] = '\0';
    smp_warn("%s", large);
    CHECK(smp_warning_take(text) && strlen(text) == sizeof(text) - 1);
}

TEST(errno_is_left_alone)
{
    char out[ROOM];

    errno = ENOENT;
    say("debug", "thing", out);
    CHECK(errno == ENOENT);
    close(STDERR_FILENO);
    smp_log(SMP_LOG_WARN, "nobody hears it");
    CHECK(errno == ENOENT);
    CHECK(!smp_log_has(SMP_LOG_WARN)); /* and is not said again */
}

RUN_TESTS
