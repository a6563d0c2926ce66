{{/* One installation a cluster: names are fixed. */}}
{{- define "stasis.labels" -}}
app.kubernetes.io/name: stasis
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "stasis.selector" -}}
app.kubernetes.io/name: stasis
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* (list CONTEXT "agent") */}}
{{- define "stasis.image" -}}
{{- $context := index . 0 }}{{ $image := index $context.Values.images (index . 1) -}}
{{ $image.repository }}:{{ $image.tag | default $context.Chart.AppVersion }}
{{- end }}

{{- define "stasis.pod" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (dict "on" .Values.webhook) */}}
{{- define "stasis.placement" -}}
{{- with .on.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .on.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .on.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "stasis.unprivileged" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "stasis.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "stasis.registryHost" -}}
stasis-registry.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "stasis.repository" -}}
{{- if .Values.store.repository }}{{ .Values.store.repository }}
{{- else if .Values.registry.enabled }}{{ include "stasis.registryHost" . }}/stasis
{{- else }}{{ fail "store.repository is empty and registry.enabled is false: checkpoints need a place" }}
{{- end }}
{{- end }}

{{/* Our certificate for the chart's registry, found by host as docker and podman do. (list CONTEXT SECRET OPTIONAL) */}}
{{- define "stasis.certsd" -}}
{{- $context := index . 0 }}{{ $host := include "stasis.registryHost" $context -}}
secret:
  secretName: {{ index . 1 }}
  optional: {{ index . 2 }}
  items:
    - {key: ca.crt, path: {{ $host }}/ca.crt}
    - {key: tls.crt, path: {{ $host }}/client.cert}
    - {key: tls.key, path: {{ $host }}/client.key}
{{- end }}

{{/* Where the registry keeps its blobs. (dict "context" CONTEXT "claim" NAME) */}}
{{- define "stasis.data" -}}
{{- if .context.Values.registry.persistence.enabled -}}
persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else -}}
emptyDir: {}
{{- end }}
{{- end }}
