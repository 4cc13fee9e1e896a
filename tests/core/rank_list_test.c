/* Ranks in words.  Spec: comm/collective/checks/rank_list.h. */
#define _POSIX_C_SOURCE 200809L
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/collective/checks/rank_list.h"

#define RANKS 1024

/* The words for these ranks. */
static const char *
said(int n, const int *ranks, size_t bytes)
{
    static char   text[8 * RANKS];
    int           names[RANKS];
    smp_rank_list list = {.names = names};

    for (int i = 0; i < n; i++) {
        smp_rank_list_add(&list, ranks[i]);
    }
    memset(text, '#', sizeof(text));
    smp_rank_list_say(&list, text, bytes);
    return text;
}

TEST(ranks_are_said_in_order_and_rows_of_them_as_ranges)
{
    static const int one[] = {7};
    static const int two[] = {4, 3};
    static const int some[] = {20, 1, 17, 16, 3,  5,  4,  6, 7,
                               15, 8, 9,  10, 11, 12, 13, 14};

    CHECK_TEXT(said(0, NULL, 256), "");
    CHECK_TEXT(said(1, one, 256), "rank 7");
    CHECK_TEXT(said(2, two, 256), "ranks 3, 4");
    CHECK_TEXT(said(17, some, 256), "ranks 1, 3 to 17, 20");
}

/* What the words say: member[r] is set for each rank.  False: they are none. */
static bool
understand(const char *text, bool *member)
{
    char *at = (char *)(uintptr_t)text + strcspn(text, "0123456789");

    memset(member, 0, RANKS * sizeof(*member));
    while (*at >= '0' && *at <= '9') {
        long first = strtol(at, &at, 10);
        long last = strncmp(at, " to ", 4) == 0 ? strtol(at + 4, &at, 10) : first;

        for (long r = first; r <= last && r < RANKS; r++) {
            member[r] = true;
        }
        at += strncmp(at, ", ", 2) == 0 ? 2 : 0;
    }
    return *at == '\0' || strcmp(at, "...") == 0;
}

/* Whole, the words are of all ranks and no others; cut off, of the first of them. */
TEST(words_say_what_is_in_them_however_little_room_there_is)
{
    static bool member[RANKS];
    uint32_t    seed = 1;

    for (int round = 0; round < 300; round++) {
        int ranks[RANKS];
        int n = 0;

        for (int r = 0; r < RANKS; r++) {
            seed = seed * 1664525 + 1013904223;
            if ((int)(seed >> 24) < (round % 16) * 17) {
                ranks[n++] = r;
            }
        }
        for (size_t bytes = 32; bytes <= 8 * RANKS; bytes *= 2) {
            const char *text = said(n, ranks, bytes);
            bool        cut = strstr(text, "...") != NULL;
            int         i = 0;

            CHECK(strlen(text) < bytes && understand(text, member));
            CHECK(!cut || bytes < 8 * RANKS);
            for (int r = 0; r < RANKS; r++) {
                if (member[r]) {
                    CHECK(i < n && ranks[i] == r);
                    i++;
                }
            }
            CHECK(i == n || (cut && i > 0));
        }
    }
}

RUN_TESTS
