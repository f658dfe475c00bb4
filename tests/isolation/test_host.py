"""What is gathered from the host: enough to work, and nothing that only its owner may read."""

import os
from pathlib import Path

import pytest

from deltabox.errors import Refused
from deltabox.isolation import host
from deltabox.isolation.policy import Facts

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"


def gather(home: Path, **environ: str) -> Facts:
    return host.gather(
        project=home / "p",
        home=home,
        user="u",
        owner=(os.geteuid(), os.getegid()),
        environ=environ,
    )


def test_gathered_files_are_readable_by_everybody_outside(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    assert Path("/usr") in facts.system
    for file in facts.etc:
        assert file.dest.stat().st_mode & 0o004
    names = {f.dest.name for f in facts.etc}
    assert "ld.so.cache" in names
    assert not names & {
        "shadow",
        "gshadow",
        "passwd",
        "group",
        "sudoers",
        "machine-id",
        "gitconfig",
    }


def test_links_of_a_merged_usr_stay_links(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    for link in facts.system_links:
        assert os.readlink(link.dest) == link.target
        assert link.dest not in facts.system


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[user]\n\tname = Ada L\n\temail = a@b.c\n", ("Ada L", "a@b.c")),
        ('[USER] name = "A # B" ; c\n email=x # y\n', ("A # B", "x")),
        ('[user]\nname = A\\\\B\\"C\nemail = e\n', ('A\\B"C', "e")),
        ("[core]\nname = no\n[user]\nname = yes\nemail = e\n[alias]\nemail = no\n", ("yes", "e")),
        ("[user]\nname = only\n", None),
        ("[user]\nname = A\x1b[31m\x07\nemail = e\n", ("A[31m", "e")),
        ("", None),
    ],
)
def test_identity_is_read_as_git_reads_it(
    tmp_path: Path, text: str, expected: tuple[str, str] | None
) -> None:
    (tmp_path / ".gitconfig").write_text(text)
    assert host.git_identity(tmp_path, {}) == expected


def test_identity_of_the_home_file_and_of_the_environment_win(tmp_path: Path) -> None:
    config = tmp_path / ".config/git/config"
    config.parent.mkdir(parents=True)
    config.write_text("[user]\nname = far\nemail = far@x\n")
    assert host.git_identity(tmp_path, {}) == ("far", "far@x")
    (tmp_path / ".gitconfig").write_text("[user]\nname = near\n")
    assert host.git_identity(tmp_path, {}) == ("near", "far@x")
    assert host.git_identity(tmp_path, {"GIT_AUTHOR_NAME": "env"}) == ("env", "far@x")


def test_identity_file_that_is_no_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".gitconfig")
    assert host.git_identity(tmp_path, {}) is None


def test_certificates_named_by_the_environment_come_once_by_content(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text(CERTIFICATE)
    facts = gather(tmp_path, SSL_CERT_FILE=str(bundle), NODE_EXTRA_CA_CERTS=str(bundle))
    place = "/etc/deltabox/certificates-1.pem"
    assert dict(facts.certificates) == {"SSL_CERT_FILE": place, "NODE_EXTRA_CA_CERTS": place}
    assert [f.content for f in facts.etc if str(f.dest) == place] == [CERTIFICATE.encode()]


def test_certificate_file_with_a_key_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text(CERTIFICATE + "-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(Refused, match=r"SSL_CERT_FILE names .* holds a private key"):
        gather(tmp_path, SSL_CERT_FILE=str(bundle))


def test_certificate_variable_that_names_something_else_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    facts = gather(tmp_path, SSL_CERT_FILE=str(tmp_path / "secret"), CURL_CA_BUNDLE="rel.pem")
    assert facts.certificates == ()


def test_root_gets_the_kernels_files_closed_and_others_need_it_not(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    if os.geteuid() == 0:
        assert Path("/proc/sys") in facts.proc_readonly
        assert all(not p.stat().st_mode & 0o004 for p in facts.proc_masked)
        assert (facts.uid, facts.gid) == (1000, 1000)
    else:
        assert (facts.proc_readonly, facts.proc_masked) == ((), ())
        assert (facts.uid, facts.gid) == (os.getuid(), os.getgid())
